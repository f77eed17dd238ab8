"""Plant each fault (memmgr_faults.py) in a copy of the tree and run the memory manager's tests against it: one must fail.

    python -m tests.memmgr.plant [WORDS]        only the faults whose names hold one of the words

Prints a table: the fault, the test that caught it, the seconds it took. Ends with 1 where one was not caught.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.memmgr.memmgr_faults import FAULTS, ROOT, Fault

#: Of one fault, in seconds: a fault that makes a loop endless counts as caught then.
TIMEOUT: Final = 300

#: Of each machine; a search for the shortest example is not worth its time here.
EXAMPLES: Final = "150"

#: The quick ones first: most faults fall there.
TESTS: Final = (
    "blocks", "prefix", "collisions", "memory", "pins", "scheduler", "beams", "session", "messages", "swap", "quotas",
    "memory_machine", "session_machine", "simulation", "small_world", "events",
)  # fmt: skip

_COPIED: Final = ("kilburn", "memmgr", "tests/memmgr", "tests/__init__.py", "tests/conftest.py", "pyproject.toml")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) \S*?test_memmgr_(\S+)", re.MULTILINE)
_TIMED_OUT: Final = "endless"


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    for name in _COPIED:
        source = ROOT / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)


def run_tests(tree: Path) -> str:
    """Return the name of the test that failed in a tree; empty where all passed."""
    files = [f"tests/memmgr/test_memmgr_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile=plant"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "KILBURN_EXAMPLES": EXAMPLES}
    try:
        ran = subprocess.run(
            [*command, *files], cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return _TIMED_OUT
    if ran.returncode == 0:
        return ""
    failed = _FAILED.search(ran.stdout)
    if ran.returncode != 1 and failed is None:
        raise RuntimeError(f"the tests could not be run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return failed[1] if failed else "?"


def catch(fault: Fault, tree: Path) -> str:
    """Plant one fault, run the tests, take it out again; return what caught it."""
    path = tree / fault.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(fault.applied(tree), encoding="utf-8")
    try:
        return run_tests(tree)
    finally:
        path.write_text(sound, encoding="utf-8")


def main(words: list[str]) -> int:
    """See the module."""
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    missed: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kilburn-faults-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if failed := run_tests(tree):
            print(f"without any fault {failed} fails: nothing can be said")
            return 1
        print(f"without a fault all pass ({time.monotonic() - began:.0f} s)", flush=True)
        for fault in faults:
            start = time.monotonic()
            caught = catch(fault, tree)
            if not caught:
                missed.append(fault.name)
            print(f"{fault.name:62} {caught or 'NOT CAUGHT':90} {time.monotonic() - start:4.0f} s", flush=True)
    print(f"{len(faults) - len(missed)} of {len(faults)} faults were caught, in {time.monotonic() - began:.0f} s")
    for name in missed:
        print(f"not caught: {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
