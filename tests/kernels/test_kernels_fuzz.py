"""Some seconds of the fuzzer, and that its sanitizers find what they are for. The long run is `python -m tests.kernels.fuzz`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import sanitized
from tests.kernels.backends import need_cpu_library
from tests.kernels.cases import Sequence
from tests.kernels.fuzz import case_of


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library compiled with sanitizers: half a minute of processor time."""
    need_cpu_library()
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    sanitized.compile_into(folder)
    return folder


def fuzz(*options: str) -> str:
    """Run the fuzzer and return what it says."""
    command = [sys.executable, "-m", "tests.kernels.fuzz", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_trials_differ_and_come_again() -> None:
    found = [case_of(seed) for seed in range(300)]
    assert found == [case_of(seed) for seed in range(300)]
    assert len(set(found)) == 300
    assert {case.block_size for case in found} > {1, 7, 16, 256}
    assert {case.threads for case in found} == {1, 2, 3}
    assert any(Sequence(0, 1) in case.sequences for case in found)


def test_some_seconds_of_it_find_nothing() -> None:
    need_cpu_library()
    assert "nothing found" in fuzz("--seconds", "8", "--seed", "1")


def test_some_seconds_of_it_with_sanitizers_find_nothing(library: Path) -> None:
    assert "nothing found" in fuzz("--seconds", "8", "--seed", "1", "--sanitize", "--build", str(library))


def test_the_sanitizers_find_each_kind_of_fault(library: Path) -> None:
    found = fuzz("--prove", "--seed", "1", "--build", str(library))
    for name in sanitized.PLANTS:
        assert f"{name}: SUMMARY: AddressSanitizer" in found
