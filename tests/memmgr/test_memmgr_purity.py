"""The memory core and the scheduler do no I/O and know no clock; the memory manager needs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memmgr

PACKAGE = Path(memmgr.__file__).parent
IMPURE = {
    "asyncio",
    "google",
    "grpc",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
    "zmq",
}
PURE_FILES = sorted((*PACKAGE.glob("core/*.py"), *PACKAGE.glob("schedule/*.py")))
SIMULATE_FILES = sorted(PACKAGE.glob("simulate/*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides what it is of"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_files_are_found() -> None:
    assert {path.stem for path in PURE_FILES} >= {"blocks", "memory", "prefix", "plans", "requests", "scheduler"}


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_core_and_schedule_are_pure(path: Path) -> None:
    names = set(imports_of(path))
    assert not {name.split(".")[0] for name in names} & IMPURE
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "__import__", "eval", "exec"}


@pytest.mark.parametrize("path", PURE_FILES + SIMULATE_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_arrow_points_upwards(path: Path) -> None:
    below = {
        "core": {"memmgr.core"},
        "schedule": {"memmgr.core", "memmgr.schedule"},
        "simulate": {"memmgr.core", "memmgr.schedule", "memmgr.simulate"},
    }[path.parent.name]
    ours = {
        name for name in imports_of(path) if name.split(".")[0] in {"memmgr", "kilburn", "executor", "gateway", "cli", "kernels"}
    }
    assert {".".join(name.split(".")[:2]) for name in ours} <= below


@pytest.mark.processes
def test_the_service_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'executor', 'gateway', 'kernels'}"
    program = f"import sys, memmgr.service; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
