"""The core and the scheduler as they are compiled: used where that is possible, and right in the same tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from memmgr.compiled.sources import PARTS, STAMP, digest, sources
from tests.memmgr.memmgr_faults import ROOT

COMPILED: Final = ROOT / "memmgr" / "compiled"

#: What needs no bug put into the core, and no process.
TESTS: Final = (
    "blocks", "prefix", "memory", "pins", "scheduler", "beams", "session", "messages", "swap", "memory_machine",
    "session_machine", "quotas_machine", "simulation", "events", "dumps", "simulate", "simulate_eviction",
    "simulate_sharing", "passing",
)  # fmt: skip

#: Of each machine.
EXAMPLES: Final = "100"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not (COMPILED / STAMP).exists(), reason="memmgr's core was not compiled: `make compile` says what it needs"
    ),
]


def asked(tree: Path, code: str, **environment: str) -> str:
    """Return what a fresh Python prints that imports the packages of a tree."""
    known = {name: value for name, value in os.environ.items() if name != "KILBURN_INTERPRETED"}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, cwd=tree, env=known | {"PYTHONPATH": str(tree)} | environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


WHY: Final = (
    "from memmgr.compiled import why_interpreted as why; import memmgr.core.memory as m; print(m.__file__, why(), sep='|')"
)


def test_it_was_compiled_from_these_sources() -> None:
    assert (COMPILED / STAMP).read_text(encoding="ascii").strip() == digest(ROOT / "memmgr"), "`make compile` does it again"


def test_processes_use_what_was_compiled() -> None:
    file, why = asked(ROOT, WHY).split("|")
    assert why == ""
    assert Path(file).parent == COMPILED / "core"


def test_the_sources_are_taken_where_that_is_asked_for() -> None:
    file, why = asked(ROOT, WHY, KILBURN_INTERPRETED="1").split("|")
    assert why == "KILBURN_INTERPRETED is set"
    assert Path(file) == ROOT / "memmgr" / "core" / "memory.py"


@pytest.mark.parametrize("what", ["nothing compiled", "another Python", "other sources"])
def test_the_sources_are_taken_where_nothing_else_fits(tmp_path: Path, what: str) -> None:
    shutil.copytree(ROOT / "memmgr", tmp_path / "memmgr", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "memmgr"
    if what == "nothing compiled":
        (package / "compiled" / STAMP).unlink()
    elif what == "another Python":
        for path in (package / "compiled").rglob("*.so"):
            path.rename(path.with_name(path.name.replace("cpython-3", "cpython-2")))
    else:
        with (package / "core" / "blocks.py").open("a") as source:
            source.write("# another line\n")
    file, why = asked(tmp_path, WHY).split("|")
    assert Path(file) == package / "core" / "memory.py"
    expected = {"nothing compiled": "a C compiler", "another Python": "another version", "other sources": "have changed"}
    assert expected[what] in why


def test_without_a_compiler_there_is_one_line_and_nothing_compiled(tmp_path: Path) -> None:
    for name in "memmgr", "deploy":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", STAMP))
    command = [sys.executable, "deploy/compile.py", "memmgr"]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | {"CC": "false"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("a C compiler and Python's headers are needed")
    assert not list(tmp_path.rglob("*.so"))
    file, why = asked(tmp_path, WHY).split("|")
    assert Path(file) == tmp_path / "memmgr" / "core" / "memory.py"
    assert "a C compiler" in why


def test_all_of_the_parts_are_compiled() -> None:
    known = sources(ROOT / "memmgr")
    assert {path.parent.name for path in known} == set(PARTS)
    assert {path.stem for path in known} >= {"memory", "blocks", "prefix", "swap", "scheduler", "requests"}


@pytest.mark.timeout(600)
def test_what_is_compiled_passes_the_tests_of_the_sources() -> None:
    files = [f"tests/memmgr/test_memmgr_{name}.py" for name in TESTS]
    environment = {name: value for name, value in os.environ.items() if name != "KILBURN_INTERPRETED"}
    environment |= {"KILBURN_TEST_COMPILED": "1", "KILBURN_EXAMPLES": EXAMPLES}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
