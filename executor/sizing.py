"""How many blocks the pool gets, and why. Knows memory in bytes; not tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from kilburn.errors import StartError
from kilburn.limits import GIB, MIB

#: Of the memory that is free, where the user said nothing: a quarter, since others run on this machine too, and not more than
#: a test or a laptop would like to lose.
_CPU_SHARE: Final = 0.25
_CPU_MOST_BYTES: Final = 4 * GIB

#: On a GPU, whose memory is for this. The rest is for activations.
_CUDA_SHARE: Final = 0.8

#: Of the free space on the pool's file system: Docker's default /dev/shm has 64 MiB, and others put files there too.
_FILE_SYSTEM_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Demand:
    """What the user asked for, and what a pool is made of."""

    frame_bytes: int
    num_blocks: int | None
    kv_memory_bytes: int | None
    most_useful_blocks: int  # more could not be filled by the sequences that may run at once


@dataclass(frozen=True, slots=True)
class Size:
    """The decision, and its reason for the log."""

    blocks: int
    reason: str


def cpu_blocks(demand: Demand, free_memory: int, free_on_file_system: int) -> Size:
    """Decide for a pool in shared memory.

    Raises:
        StartError: what was asked for does not fit into the memory that is free, or not one block does.
    """
    size = _asked(demand)
    if size is None:
        share = int(min(free_memory * _CPU_SHARE, _CPU_MOST_BYTES))
        room = int(free_on_file_system * _FILE_SYSTEM_SHARE)
        size = _share(demand, min(share, room), "a share of free memory" if share <= room else "free space in the pool's folder")
    needed = (size.blocks + 1) * demand.frame_bytes
    if needed > free_memory:
        raise StartError(
            f"{size.blocks} blocks need {needed / MIB:,.1f} MiB, and {free_memory / MIB:,.1f} MiB of memory are free; "
            "give a smaller --num-blocks or --kv-memory"
        )
    return size


def cuda_blocks(demand: Demand, free_memory: int) -> Size:
    """Decide for a pool in a GPU's memory, the weights already being there.

    Raises:
        StartError: not one block fits.
    """
    return _asked(demand) or _share(demand, int(free_memory * _CUDA_SHARE), "a share of free device memory")


def smallest(own: Size, blocks: int) -> Size:
    """Return this rank's size where the smallest of all ranks has so many blocks."""
    return own if own.blocks == blocks else Size(blocks, "the rank with the least room")


def check_host(blocks: int, frame_bytes: int, pool_bytes: int) -> None:
    """Check that so many frames fit the host's memory beside a pool of `pool_bytes` in it.

    Raises:
        StartError: they do not.
    """
    needed, free = blocks * frame_bytes, free_memory_bytes() - pool_bytes
    if blocks and needed > free:
        raise StartError(
            f"--host-blocks {blocks} need {needed / MIB:,.1f} MiB, and {max(0, free) / MIB:,.1f} MiB of memory are free; "
            "give fewer"
        )


def free_memory_bytes() -> int:
    """Return the memory that this process may still take: of the machine, or of its control group where that has a limit."""
    free = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _read_number(Path(limit)), _read_number(Path(used))
        if most is not None and now is not None:
            free = min(free, max(0, most - now))
    return free


def _asked(demand: Demand) -> Size | None:
    if demand.num_blocks is not None:
        if demand.num_blocks < 1:
            raise StartError(f"--num-blocks is at least 1, not {demand.num_blocks}")
        return Size(demand.num_blocks, "--num-blocks")
    if demand.kv_memory_bytes is None:
        return None
    return _whole(demand, demand.kv_memory_bytes, "--kv-memory")


def _share(demand: Demand, size: int, reason: str) -> Size:
    found = _whole(demand, size, reason)
    if found.blocks > demand.most_useful_blocks:
        return Size(demand.most_useful_blocks, "all that --max-running sequences can fill")
    return found


def _whole(demand: Demand, size: int, reason: str) -> Size:
    """Return how many frames fit into `size` bytes, the scratch frame among them."""
    blocks = size // demand.frame_bytes - 1
    if blocks < 1:
        raise StartError(
            f"{reason} gives {size / MIB:,.1f} MiB, too little for a block of {demand.frame_bytes / MIB:,.3f} MiB; "
            "give more --kv-memory"
        )
    return Size(blocks, reason)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
