"""The pool: its file, its header, its poison, and what is said where there is no room."""

import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor.pool import (
    HEADER_VERSION,
    Pool,
    PoolSpec,
    check_pool_dir,
    device_pool,
    pool_path,
    read_header,
    remove_leftover,
    shared_pool,
)
from kilburn.errors import StartError
from kilburn.v1.engine_pb2 import ModelInfo, PoolHeader
from kilburn.wire.endpoints import instance_id

SHARED_MEMORY = Path("/dev/shm")


def header(incarnation: int = 7) -> PoolHeader:
    return PoolHeader(
        version=HEADER_VERSION,
        model=ModelInfo(name="tiny", fingerprint="f" * 64, block_size=4, total_blocks=5, dtype="float32"),
        layout="some-layout/1",
        executor_incarnation=incarnation,
    )


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A place in the system's shared memory that no other test has."""
    found = pool_path(None, tmp_path)
    yield found
    found.unlink(missing_ok=True)


def make(path: Path, *, blocks: int = 5, dtype: torch.dtype = torch.float32) -> Pool:
    return shared_pool(PoolSpec(blocks, 24, dtype), path, header())


def test_its_name_is_made_from_the_runtime_folder(tmp_path: Path) -> None:
    assert pool_path(None, tmp_path) == SHARED_MEMORY / f"kilburn-{instance_id(tmp_path)}.pool"
    assert pool_path(tmp_path, tmp_path / "a") != pool_path(tmp_path, tmp_path / "b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_file_is_a_header_page_and_the_frames(path: Path, dtype: torch.dtype) -> None:
    pool = make(path, dtype=dtype)
    assert pool.frames.shape == (6, 24)  # five blocks and the scratch block
    assert pool.frames.data_ptr() % mmap.PAGESIZE == 0
    pool.frames[2] = torch.arange(24)
    data = path.read_bytes()
    assert len(data) == mmap.PAGESIZE + 6 * 24 * dtype.itemsize
    assert read_header(data) == header()
    frame = 24 * dtype.itemsize
    stored = torch.frombuffer(bytearray(data[mmap.PAGESIZE + 2 * frame :][:frame]), dtype=dtype)
    assert torch.equal(stored, torch.arange(24).to(dtype))
    assert path.stat().st_mode & 0o777 == 0o600
    assert pool.faults() == []


def test_all_of_it_is_reserved(path: Path) -> None:
    make(path, blocks=10_000)
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size


def test_it_goes_at_a_clean_end(path: Path) -> None:
    pool = make(path)
    pool.close()
    assert not path.exists()
    assert pool.path is None
    assert int(pool.frames.count_nonzero()) == 0  # the memory stays as long as a tensor looks into it
    pool.close()


def test_a_leftover_is_taken_over(path: Path) -> None:
    """Of an executor that was killed: a file of another size, full of something else."""
    path.write_bytes(b"\xff" * 1_000_000)
    pool = make(path)
    assert read_header(path.read_bytes()) == header()
    assert int(pool.frames.count_nonzero()) == 0


def test_a_leftover_is_removed(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"\xff")
    remove_leftover(path)
    assert not path.exists()
    remove_leftover(path)
    with pytest.raises(StartError, match="can't remove"):
        remove_leftover(tmp_path)


def test_a_link_of_its_name_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    make(path)
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


def test_poison(path: Path) -> None:
    pool = make(path)
    pool.poison([1, 3])
    assert pool.frames.isnan().all(dim=1).tolist() == [False, True, False, True, False, False]
    assert not pool.frames[[0, 2, 4, 5]].isnan().any()
    pool.poison()
    assert bool(pool.frames.isnan().all())
    assert pool.faults() == []


def test_a_header_that_someone_else_wrote_is_a_fault(path: Path) -> None:
    pool = make(path)
    with path.open("r+b") as file:
        file.write(bytes(10))
    assert pool.faults() == [f"{path}: no pool of Kilburn's"]
    encoded = header(incarnation=8).SerializeToString()
    with path.open("r+b") as file:
        file.write(len(encoded).to_bytes(4, "little") + encoded)
    assert pool.faults() == [f"{path}: the header is not the one that was written"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(4096), "no pool"),
        (b"\xff" * 4096, "no pool"),
        ((8).to_bytes(4, "little") + b"\xff" * 4092, "damaged"),
        ((2).to_bytes(4, "little") + PoolHeader(version=99).SerializeToString() + bytes(4090), "a header of version 99, not 1"),
    ],
)
def test_what_is_no_header_is_not_read_as_one(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_header(data)


def test_no_room_says_how_much_is_needed_and_free(path: Path) -> None:
    """More than the file system has: nothing is left behind."""
    free = os.statvfs(SHARED_MEMORY)
    blocks = free.f_blocks * free.f_frsize // 96 + 1_000_000
    with pytest.raises(StartError, match=rf"the pool needs [\d,.]+ MiB for {blocks} blocks, and /dev/shm has [\d,.]+ MiB free"):
        make(path, blocks=blocks)
    assert not path.exists()


def test_a_folder_on_a_disk_is_refused(tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder is in memory here")
    with pytest.raises(StartError, match=rf"--pool-dir {tmp_path} is on a disk"):
        check_pool_dir(tmp_path)


def test_a_folder_in_memory_is_taken(tmp_path: Path) -> None:
    inside = SHARED_MEMORY / f"kilburn-test-{instance_id(tmp_path)}"
    inside.mkdir()
    try:
        check_pool_dir(inside)
    finally:
        inside.rmdir()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="there is no such folder"):
        check_pool_dir(tmp_path / "nowhere")


def test_there_are_frames_on_the_host_once_they_are_asked_for() -> None:
    pool = device_pool(PoolSpec(4, 8, torch.float32), torch.device("cpu"), header())
    assert pool.host_blocks == 0
    pool.add_host(3)
    assert pool.host_blocks == 3
    assert pool.host_frames.shape == (3, 8)
    assert pool.host_frames.dtype == torch.float32
    assert pool.host_frames.device.type == "cpu"


def test_more_host_memory_than_there_is_names_the_flag() -> None:
    pool = device_pool(PoolSpec(1, 2**20, torch.float32), torch.device("cpu"), header())
    with pytest.raises(StartError, match="--host-blocks 1000000000"):
        pool.add_host(10**9)


def test_a_pool_on_a_device_has_no_file() -> None:
    pool = device_pool(PoolSpec(3, 8, torch.float16), torch.device("cpu"), header())
    assert pool.frames.shape == (4, 8)
    assert pool.path is None
    assert pool.faults() == []
    pool.close()
