"""Every Triton kernel compiled for sm_80 and sm_90, with no GPU there: no spills, shared memory within the chip's limit."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import pytest
import triton

from benchmarks import triton_resources
from benchmarks.triton_resources import HEAD_SIZES, TARGETS, Resources

REPOSITORY: Final = triton_resources.DOCUMENT.parents[1]

KERNELS: Final = (
    "decode, splits",
    "decode, one split; window, soft-cap, sinks",
    "join",
    "prefill",
    "prefill; window, soft-cap, sinks",
    "write",
)

SPILLING: Final = """
from dataclasses import replace
from benchmarks.triton_resources import TARGETS, launches, resources
name, decode = next(launches(256, TARGETS[0].chip))
print(resources(name, 256, replace(decode, warps=1), TARGETS[0]).spilled)
"""


def outside(*arguments: str) -> str:
    """Run Python where nothing is interpreted: the other tests have Triton so."""
    found = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def compiled() -> list[Resources]:
    return [Resources(**one) for one in json.loads(outside("-m", "benchmarks.triton_resources", "--json"))]


def test_every_kernel_is_compiled_for_every_chip(compiled: Sequence[Resources]) -> None:
    found = [(one.kernel, one.head_size, one.capability) for one in compiled]
    capabilities = [target.capability for target in TARGETS]
    expected: list[tuple[str, int | None, int]]
    expected = [(kernel, size, chip) for kernel in KERNELS for size in HEAD_SIZES for chip in capabilities]
    expected += [("copy", None, chip) for chip in capabilities]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_nothing_spills(compiled: Sequence[Resources]) -> None:
    assert [one for one in compiled if one.spilled] == []


def test_shared_memory_is_within_the_chips_limit(compiled: Sequence[Resources]) -> None:
    assert [one for one in compiled if not 0 <= one.shared <= one.shared_limit] == []
    assert all(one.shared > 0 for one in compiled if one.kernel.startswith(("decode", "prefill")))
    assert all(one.programs >= 1 for one in compiled)


def test_the_documents_table_is_what_was_compiled(compiled: Sequence[Resources]) -> None:
    told = triton_resources.written()
    if f"Triton {triton.__version__}:" not in told:
        pytest.skip(f"the table is another Triton's, not {triton.__version__}'s")
    assert told == triton_resources.table(compiled, triton.__version__)


def test_a_kernel_that_spills_is_found_out() -> None:
    """Or the tests above could not fail."""
    assert int(outside("-c", SPILLING)) > 0
