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
    """Return a folder with the library compiled with AddressSanitizer: without the other one it takes half as long."""
    need_cpu_library()
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    sanitized.compile_into(folder, sanitized.ADDRESSES)
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
    assert {case.block_size for case in found} > {1, 2, 23, 128, 256}
    assert {case.threads for case in found} == {1, 2, 3}
    assert any(Sequence(0, 1) in case.sequences for case in found)


def test_some_seconds_of_it_find_nothing() -> None:
    need_cpu_library()
    assert "nothing found" in fuzz("--seconds", "5", "--seed", "1")


def test_sanitizers_find_each_kind_of_fault_and_then_nothing(library: Path) -> None:
    found = fuzz("--prove", "--sanitize", "--seconds", "4", "--seed", "1", "--build", str(library))
    for name in sanitized.PLANTS:
        assert f"{name}: SUMMARY: AddressSanitizer" in found
    assert "nothing found" in found
