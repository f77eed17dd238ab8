"""The physical pool: one contiguous frame a block, in a shared-memory file on the CPU, in device memory on a GPU.

Knows frames, files and their header; not who holds a block.

The file:  [ length, uint32 little-endian | PoolHeader | zeros up to one page ][ frame 0 ][ frame 1 ] ... [ scratch frame ]
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from kilburn.errors import StartError
from kilburn.limits import MIB
from kilburn.v1.engine_pb2 import PoolHeader
from kilburn.wire.endpoints import instance_id

HEADER_VERSION: Final = 1

_PAGE: Final = mmap.PAGESIZE
_LENGTH: Final = struct.Struct("<I")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the system's, and the file is made exclusively

#: File systems whose files are memory. On any other the pool would be written to a disk.
_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a pool has to hold: `blocks` frames that can be given out, and the scratch frame behind them."""

    blocks: int
    elements: int  # of `dtype` in one frame
    dtype: torch.dtype

    @property
    def frame_bytes(self) -> int:
        """Size of one frame."""
        return self.elements * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Size of all frames, the scratch frame among them."""
        return (self.blocks + 1) * self.frame_bytes


class Pool:
    """The frames, [blocks + 1, elements], scratch last. Made by `shared_pool` or `device_pool`; `close` it at a clean end.

    `host_frames`, [host blocks, elements], are memory on the host to swap to: none before `add_host`.
    """

    def __init__(self, spec: PoolSpec, frames: Tensor, header: PoolHeader, file: "_PoolFile | None" = None) -> None:
        assert frames.shape == (spec.blocks + 1, spec.elements)
        assert frames.is_contiguous()
        self.spec = spec
        self.frames = frames
        self._header = header
        self._file = file
        self.host_frames = frames.new_empty(0, spec.elements, device="cpu")

    @property
    def path(self) -> Path | None:
        """The shared-memory file, on the CPU."""
        return None if self._file is None else self._file.path

    @property
    def host_blocks(self) -> int:
        """How many frames there are on the host, to swap to."""
        return int(self.host_frames.shape[0])

    def add_host(self, blocks: int) -> None:
        """Take memory on the host for so many frames; pinned where the pool is on a GPU, so that copies need no detour.

        Raises:
            StartError: there is not enough.
        """
        try:
            # Written once, so that the memory is there when it is needed.
            self.host_frames = torch.zeros(
                blocks, self.spec.elements, dtype=self.spec.dtype, pin_memory=self.frames.device.type == "cuda"
            )
        except RuntimeError as error:
            size = _mib(blocks * self.spec.frame_bytes)
            raise StartError(f"there is no {size} of host memory for --host-blocks {blocks}; give fewer") from error

    def poison(self, blocks: Iterable[int] | None = None) -> None:
        """Fill the given blocks, or everything, with NaN: whoever reads what was not written is found out."""
        if blocks is None:
            self.frames.fill_(torch.nan)
            return
        for block in blocks:
            self.frames[block].fill_(torch.nan)

    def faults(self) -> list[str]:
        """Return what is wrong with the pool by itself: a header that is not ours any more."""
        if self._file is None:
            return []
        try:
            found = read_header(self._file.map)
        except ValueError as error:
            return [f"{self._file.path}: {error}"]
        return [] if found == self._header else [f"{self._file.path}: the header is not the one that was written"]

    def close(self) -> None:
        """Remove the file. The memory itself goes with the last tensor that looks into it."""
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)
            self._file = None


@dataclass(frozen=True, slots=True)
class _PoolFile:
    path: Path
    map: mmap.mmap


def pool_path(pool_dir: Path | None, runtime_dir: Path, rank: int = 0) -> Path:
    """Return where the pool's file of an instance lies; each rank of an executor has its own."""
    number = f".{rank}" if rank else ""
    return (pool_dir or _SHARED_MEMORY) / f"kilburn-{instance_id(runtime_dir)}{number}.pool"


def check_pool_dir(path: Path) -> None:
    """Check that files in this folder are memory.

    Raises:
        StartError: they are not, or there is no such folder.
    """
    if not path.is_dir():
        raise StartError(f"--pool-dir {path}: there is no such folder")
    kind = _file_system(path)
    if kind not in _MEMORY_FILE_SYSTEMS:
        raise StartError(f"--pool-dir {path} is on a disk ({kind}); the pool has to be memory: name a folder on a tmpfs")


def free_bytes(pool_dir: Path | None) -> int:
    """Return how much a new file may take on the pool's file system."""
    status = os.statvfs(pool_dir or _SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def remove_leftover(path: Path) -> None:
    """Remove the file of a pool whose owner was killed. The caller holds the instance's lock.

    Raises:
        StartError: it can't be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartError(f"can't remove the pool's file {path} of an executor that died: {error.strerror}") from error


def shared_pool(spec: PoolSpec, path: Path, header: PoolHeader) -> Pool:
    """Make the file, all of it reserved, and map it. A leftover of the same name is removed: its owner is dead.

    The caller holds the instance's lock.

    Raises:
        StartError: there is not enough memory for it, or the file can't be made.
    """
    encoded = header.SerializeToString()
    assert _LENGTH.size + len(encoded) <= _PAGE
    size = _PAGE + spec.bytes
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"can't make the pool's file {path}: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StartError(_no_room(error, spec, path, size)) from error
    finally:
        os.close(descriptor)
    mapped[: _LENGTH.size + len(encoded)] = _LENGTH.pack(len(encoded)) + encoded
    frames = torch.frombuffer(mapped, dtype=spec.dtype, offset=_PAGE, count=(spec.blocks + 1) * spec.elements)
    return Pool(spec, frames.view(spec.blocks + 1, spec.elements), header, _PoolFile(path, mapped))


def device_pool(spec: PoolSpec, device: torch.device, header: PoolHeader) -> Pool:
    """Take the pool from a device's memory.

    Raises:
        StartError: there is not enough.
    """
    try:
        frames = torch.zeros(spec.blocks + 1, spec.elements, dtype=spec.dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"{device} has no {_mib(spec.bytes)} for the pool; give a smaller --num-blocks or --kv-memory"
        ) from error
    return Pool(spec, frames, header)


def read_header(data: mmap.mmap | bytes) -> PoolHeader:
    """Return the header of a pool's file.

    Raises:
        ValueError: there is none, or it is of another version.
    """
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    if not 0 < length <= _PAGE - _LENGTH.size:
        raise ValueError("no pool of Kilburn's")
    try:
        header = PoolHeader.FromString(data[_LENGTH.size : _LENGTH.size + length])
    except DecodeError as error:
        raise ValueError("a damaged header") from error
    if header.version != HEADER_VERSION:
        raise ValueError(f"a header of version {header.version}, not {HEADER_VERSION}")
    return header


def _no_room(error: OSError, spec: PoolSpec, path: Path, size: int) -> str:
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return f"can't reserve the pool's file {path}: {error.strerror}"
    return (
        f"the pool needs {_mib(size)} for {spec.blocks} blocks, and {path.parent} has {_mib(free_bytes(path.parent))} free; "
        "give a smaller --num-blocks or --kv-memory, or a larger --pool-dir"
    )


def _file_system(path: Path) -> str:
    """Return the kind of the file system that a folder lies on: that of the longest mount point above it."""
    resolved = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    if not mounts:
        return "unknown"
    # Of two mounts on one point the later one is seen.
    return max(enumerate(mounts), key=lambda numbered: (len(Path(numbered[1].mountpoint).parts), numbered[0]))[1].fstype


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
