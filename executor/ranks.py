"""The ranks of a tensor-parallel executor: who is one, and what they say to each other over torch.distributed.

Knows process groups and bytes; not plans or models. Ranks meet through a file in the runtime folder, so nothing listens while
they do; gloo and NCCL are told to use the loopback interface. What is said is the bytes of a protobuf message or whole numbers;
nothing is pickled. On a GPU bytes still go over gloo, from memory of the host, and NCCL is the model's alone.
"""

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from executor.errors import ExecutorError
from kilburn.errors import StartError
from kilburn.limits import MAX_FRAME_BYTES
from kilburn.log import Logger

#: Where the ranks of one launch meet; set by executor/launch.py. Without it torchrun was called by hand, and its store is used.
MEETING: Final = "KILBURN_RANKS_FILE"

#: A rank that waits so long for another ends. The longest wait that is nobody's fault is for the other's half of the weights.
TIMEOUT: Final = timedelta(seconds=120)

#: From the end of another rank to ours, where the main thread does not end by itself.
_LAST_WORDS_SECONDS: Final = 0.5

#: Of a command beside its plan: what rank 0 drew, at most 3 bytes a sample on average, and the fields' headers.
_MAX_BYTES: Final = MAX_FRAME_BYTES + 2**20

#: The first broadcast has the length and this many bytes, so that the plan of a common step needs no second.
_FIRST_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8


def is_rank() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def own_rank() -> int:
    """Return the number of this process among those that torchrun has started; 0 where it has not."""
    return int(os.environ.get("RANK", "0")) if is_rank() else 0


class Ranks:
    """The process group, made by `meet`. All ranks call the same methods in the same order.

    Raises, each method:
        ExecutorError: a rank is gone, or silent for TIMEOUT.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.ending = threading.Event()  # set before the last command: ranks may be gone from now on

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Give the bytes of one rank to all; `data` is read on that rank alone."""
        first = np.zeros(_LENGTH_BYTES + _FIRST_BYTES, dtype=np.uint8)
        if self.rank == source:
            assert data is not None
            assert len(data) <= _MAX_BYTES
            first[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8)
            first[_LENGTH_BYTES : _LENGTH_BYTES + min(len(data), _FIRST_BYTES)] = np.frombuffer(data[:_FIRST_BYTES], np.uint8)
        self._broadcast(torch.from_numpy(first), source)
        length = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
        if length > _MAX_BYTES:
            raise ExecutorError(f"rank {source} announces {length} bytes; at most {_MAX_BYTES} are taken")
        begin = first[_LENGTH_BYTES : _LENGTH_BYTES + min(length, _FIRST_BYTES)].tobytes()
        if length <= _FIRST_BYTES:
            return begin
        rest = np.zeros(length - _FIRST_BYTES, dtype=np.uint8)
        if self.rank == source:
            assert data is not None
            rest[:] = np.frombuffer(data[_FIRST_BYTES:], dtype=np.uint8)
        self._broadcast(torch.from_numpy(rest), source)
        return begin + rest.tobytes()

    def collect(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, in the order of ranks."""
        return [self.broadcast(data, source) for source in range(self.world)]

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers. No rank returns before each has called."""
        found = torch.tensor([number], dtype=torch.int64)
        with _others_there():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def _broadcast(self, data: Tensor, source: int) -> None:
        with _others_there():
            dist.broadcast(data, source)


@contextmanager
def meet(world: int, kind: str, log: Logger) -> Iterator[Ranks]:
    """Join the other ranks; `kind` is the device's, cpu or cuda.

    If one of them ends before `ending` is set, so does this process.

    Raises:
        StartError: torchrun has started another number of processes, or they do not find each other.
    """
    started = int(os.environ["WORLD_SIZE"])
    if started != world:
        raise StartError(f"torchrun has started {started} processes, and --tensor-parallel is {world}")
    rank = own_rank()
    # All ranks are on this machine: nothing of a sequence leaves it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    path = os.environ.get(MEETING)
    try:
        if path is None:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, f"file://{path}", rank=rank, world_size=world, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise StartError(f"the ranks of the executor do not find each other: {_first_line(error)}") from error
    ranks = Ranks(rank, world)
    pids = [int.from_bytes(pid, "little") for pid in ranks.collect(os.getpid().to_bytes(8, "little"))]
    others = {pid: number for number, pid in enumerate(pids) if number != rank}
    threading.Thread(target=_watch, args=(others, ranks.ending, log), name="ranks", daemon=True).start()
    yield ranks
    ranks.ending.set()
    # Not after an error: it would wait for ranks that may be gone.
    dist.destroy_process_group()


def _watch(others: dict[int, int], ending: threading.Event, log: Logger) -> None:
    """End this process when another rank (process id -> rank) ends.

    The main thread may be in a collective then, in native code, and wait for the dead until TIMEOUT.
    """
    poller, numbers = select.poll(), {}
    gone = -1
    try:
        for pid, number in others.items():
            descriptor = os.pidfd_open(pid)
            numbers[descriptor] = number
            poller.register(descriptor, select.POLLIN)
        gone = numbers[poller.poll()[0][0]]
    except ProcessLookupError:
        gone = number
    # The main thread may know already, or have failed for the same reason, and be about to tell memmgr.
    time.sleep(_LAST_WORDS_SECONDS)
    if not ending.is_set():
        log.error("another rank of this executor is gone", rank=gone)
        os._exit(1)


def meeting_path(runtime_dir: Path) -> Path:
    """Return the file where the ranks of an instance meet."""
    return runtime_dir / "executor.ranks"


@contextmanager
def _others_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExecutorError(f"a rank of the executor is gone or silent: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
