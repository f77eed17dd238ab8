"""The folder `kernels` has the name of Hugging Face's package; see kernels/__init__.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
import kilburn
from kilburn.errors import StartError

REPOSITORY = Path(kernels.__file__).parent.parent


def python(code: str, *folders: Path) -> "subprocess.CompletedProcess[str]":
    """Run code in a fresh interpreter that finds our packages, and what lies in `folders`, as an installation would."""
    path = os.pathsep.join(map(str, (*folders, REPOSITORY)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def distribution(folder: Path, name: str, version: str, *, packages: str) -> Path:
    """Make the metadata of an installed distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(packages)
    (info / "RECORD").write_text(f"{packages}/__init__.py,,\n")
    return folder


AVAILABLE = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"


def test_importing_the_package_imports_nothing_else() -> None:
    found = python("import sys; before = set(sys.modules); import kernels; print(sorted(set(sys.modules) - before))")
    assert found.stdout.strip() == "['kernels']", found.stderr


def test_our_version_is_outside_of_the_window_that_transformers_takes() -> None:
    from packaging.version import Version
    from transformers.utils import import_utils

    ours = Version(kilburn.__version__)
    assert not Version(import_utils.KERNELS_MIN_VERSION) <= ours < Version(import_utils.KERNELS_MAX_VERSION)


def test_transformers_does_not_take_our_package_for_its_own(tmp_path: Path) -> None:
    """Neither from a checkout nor from an installation, whose distribution owns the import name."""
    installed = distribution(tmp_path, "kilburn", kilburn.__version__, packages="kernels")
    for folders in ((), (installed,)):
        found = python(AVAILABLE, *folders)
        assert found.stdout.strip() == "False", found.stderr


def test_transformers_would_take_it_with_a_version_in_the_window(tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    found = python(AVAILABLE, distribution(tmp_path, "kilburn", "0.18.3", packages="kernels"))
    assert found.stdout.strip() == "True", found.stderr


CHECK = """
from executor.clash import check_kernels_package
from kilburn.errors import StartError
try:
    check_kernels_package()
except StartError as error:
    print("refused:", error)
else:
    print("passed")
"""


def test_the_executor_starts_beside_nothing_of_that_name(tmp_path: Path) -> None:
    assert python(CHECK).stdout.strip() == "passed"
    installed = distribution(tmp_path, "kilburn", kilburn.__version__, packages="kernels")
    assert python(CHECK, installed).stdout.strip() == "passed"


def test_the_executor_refuses_to_start_beside_hugging_faces_package(tmp_path: Path) -> None:
    found = python(CHECK, distribution(tmp_path, "kernels", "0.18.5", packages="kernels")).stdout
    assert found.startswith("refused: the package 'kernels' 0.18.5 of Hugging Face is installed"), found


def test_the_executor_refuses_a_foreign_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    found = python(CHECK, tmp_path).stdout
    assert found.startswith(f"refused: `import kernels` finds {tmp_path / 'kernels' / '__init__.py'}, not Kilburn's"), found


def test_the_check_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service runs it before it imports transformers or takes a lock."""
    from executor import service
    from kilburn.config import ExecutorConfig

    def refuse() -> None:
        raise StartError("the check")

    monkeypatch.setattr(service, "check_kernels_package", refuse)
    with pytest.raises(StartError, match="the check"):
        service.run(ExecutorConfig(runtime_dir=tmp_path / "run", executor_endpoint="ipc:///nowhere", model="nothing"))
    assert not (tmp_path / "run").exists()
