"""The core and the scheduler, compiled by mypyc: the same modules, two to three times as fast. `deploy/compile.py` makes them.

What is here takes the place of the sources as long as it was made of these sources, by this version of Python. Else they are
interpreted, which only costs time; KILBURN_INTERPRETED=1 asks for it.
"""

import os
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from memmgr.compiled.sources import PARTS, STAMP, digest, sources

_FOLDER: Final = Path(__file__).parent


def use() -> None:
    """Have the compiled modules imported instead of the sources, where that is possible. Before any of them is imported."""
    if not why_interpreted():
        for part in PARTS:
            import_module(f"memmgr.{part}").__path__.insert(0, str(_FOLDER / part))


@cache
def why_interpreted() -> str:
    """Return why the sources are interpreted in this process; empty: they are not."""
    if os.environ.get("KILBURN_INTERPRETED"):
        return "KILBURN_INTERPRETED is set"
    package = _FOLDER.parent
    try:
        made_of = (_FOLDER / STAMP).read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return "it was not compiled: a C compiler and Python's headers have to be there when the package is installed"
    missing = [path.stem for path in sources(package) if not _compiled(path).exists()]
    if missing:
        return f"it was compiled for another version of Python: {_compiled(Path(missing[0])).name} is missing"
    if digest(package) != made_of:
        return "its sources have changed since it was compiled; `make compile` does it again"
    return ""


def _compiled(path: Path) -> Path:
    return _FOLDER / path.parent.name / (path.stem + EXTENSION_SUFFIXES[0])
