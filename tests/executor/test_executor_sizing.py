"""How many blocks a pool gets."""

import pytest

from executor.sizing import Demand, cpu_blocks, cuda_blocks, free_memory_bytes
from kilburn.errors import StartError
from kilburn.limits import GIB, MIB


def demand(
    *, frame_bytes: int = MIB, num_blocks: int | None = None, kv_memory_bytes: int | None = None, useful: int = 10**9
) -> Demand:
    return Demand(frame_bytes, num_blocks, kv_memory_bytes, useful)


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    size = cpu_blocks(demand(num_blocks=10, kv_memory_bytes=GIB, useful=3), 8 * GIB, 8 * GIB)
    assert (size.blocks, size.reason) == (10, "--num-blocks")


def test_memory_holds_the_scratch_block_too() -> None:
    assert cpu_blocks(demand(kv_memory_bytes=64 * MIB), 8 * GIB, 8 * GIB).blocks == 63
    assert cpu_blocks(demand(kv_memory_bytes=64 * MIB + MIB // 2), 8 * GIB, 8 * GIB).blocks == 63


@pytest.mark.parametrize(
    ("free_memory", "free_space", "expected"),
    [
        (8 * GIB, 100 * GIB, 2 * 1024 - 1),  # a quarter
        (100 * GIB, 100 * GIB, 4 * 1024 - 1),  # at most 4 GiB
        (8 * GIB, 64 * MIB, 56),  # nine tenths of Docker's shared memory
    ],
)
def test_the_default_is_a_share_of_what_is_free(free_memory: int, free_space: int, expected: int) -> None:
    assert cpu_blocks(demand(), free_memory, free_space).blocks == expected


def test_the_default_is_not_more_than_can_be_filled() -> None:
    size = cpu_blocks(demand(useful=50), 8 * GIB, 8 * GIB)
    assert (size.blocks, size.reason) == (50, "all that --max-running sequences can fill")


@pytest.mark.parametrize("asked", [demand(num_blocks=10_000), demand(kv_memory_bytes=10 * GIB)])
def test_more_than_is_free_is_refused(asked: Demand) -> None:
    with pytest.raises(StartError, match=r"blocks need [\d,.]+ MiB, and 8,192.0 MiB of memory are free"):
        cpu_blocks(asked, 8 * GIB, 100 * GIB)


@pytest.mark.parametrize("asked", [demand(kv_memory_bytes=MIB), demand(frame_bytes=GIB)])
def test_less_than_a_block_is_refused(asked: Demand) -> None:
    with pytest.raises(StartError, match="too little for a block"):
        cpu_blocks(asked, 2 * GIB, 100 * GIB)


@pytest.mark.parametrize("number", [0, -1])
def test_no_blocks_are_refused(number: int) -> None:
    with pytest.raises(StartError, match="--num-blocks is at least 1"):
        cpu_blocks(demand(num_blocks=number), 8 * GIB, 8 * GIB)


def test_a_gpu_gives_most_of_what_is_free() -> None:
    assert cuda_blocks(demand(), 100 * GIB).blocks == 80 * 1024 - 1
    assert cuda_blocks(demand(num_blocks=7), 100 * GIB).blocks == 7


def test_free_memory_is_some() -> None:
    assert free_memory_bytes() > 0
