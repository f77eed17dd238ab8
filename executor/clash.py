"""Refuses to start where Hugging Face's package `kernels` is installed beside ours; see kernels/__init__.py.

Looks at installed distributions only: it has to run before transformers, or our own `kernels`, is imported.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

from kilburn.errors import StartError


def check_kernels_package() -> None:
    """Let pass only our own `kernels`.

    Raises:
        StartError: the distribution `kernels` is installed, or the import name leads to someone else's folder.
    """
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise StartError(
            f"the package 'kernels' {version} of Hugging Face is installed here, and transformers would take Kilburn's for it; "
            "run `pip uninstall kernels`, or install Kilburn into an environment of its own"
        )
    ours = Path(__file__).parent.parent / "kernels" / "__init__.py"
    spec = importlib.util.find_spec("kernels")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != ours.resolve():
        found = "nothing" if spec is None else str(spec.origin)
        raise StartError(f"`import kernels` finds {found}, not Kilburn's {ours.parent}; look at PYTHONPATH")
