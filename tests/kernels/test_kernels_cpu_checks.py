"""What the native backend refuses, because the library would end the process over it or read what nobody owns."""

import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from tests.kernels.backends import need_cpu_library

SHAPE = CacheShape((LayerShape(1, 16, 16),), 16, torch.float32)
RULE = AttentionRule(scale=1.0)


def one_row(device: str = "cpu") -> StepRows:
    return StepRows(1, (1,), (1,), torch.zeros(1, 1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64))


@pytest.fixture
def backend() -> CpuBackend:
    need_cpu_library()
    return CpuBackend()


@pytest.fixture
def cache(backend: CpuBackend) -> KvCache:
    return KvCache(SHAPE, torch.zeros(4, backend.layout(SHAPE).elements))


def test_no_heads_and_no_tokens_in_a_block(backend: CpuBackend, cache: KvCache) -> None:
    with pytest.raises(AssertionError):
        backend.paged_attention(backend.prepare(cache, one_row()), 0, torch.zeros(1, 0, 16), RULE)
    with pytest.raises(AssertionError):
        backend.layout(CacheShape(SHAPE.layers, 0, torch.float32))


def test_tensors_on_another_device(backend: CpuBackend, cache: KvCache) -> None:
    here, elsewhere = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16, device="meta")
    prepared = backend.prepare(cache, one_row())
    with pytest.raises(AssertionError):
        backend.prepare(cache, one_row("meta"))
    with pytest.raises(AssertionError):
        backend.write_kv(prepared, 0, elsewhere, here)
    with pytest.raises(AssertionError):
        backend.write_kv(prepared, 0, here, elsewhere)
    with pytest.raises(AssertionError):
        backend.paged_attention(prepared, 0, elsewhere, RULE)
    with pytest.raises(AssertionError):
        backend.swap_blocks(torch.zeros_like(cache.frames, device="meta"), cache.frames, [(0, 1)])


def test_moves_that_are_no_pairs_and_frames_with_gaps(backend: CpuBackend, cache: KvCache) -> None:
    with pytest.raises(AssertionError):
        backend.copy_blocks(cache, [(0, 1, 2)])  # type: ignore[list-item]
    wide = torch.zeros(4, 2 * cache.frames.shape[1])
    with pytest.raises(AssertionError):
        backend.swap_blocks(wide[:, ::2], cache.frames, [(0, 1)])
