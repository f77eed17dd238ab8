"""What the CPU's kernels refuse, because the library would end the process over it or touch memory that is not theirs."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import kernels.cpu
from kernels.cpu import library
from kernels.cpu.backend import CpuBackend, PreparedStep
from kernels.interface import AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from tests.kernels.backends import need_cpu_library

SHAPE: Final = CacheShape((LayerShape(2, 16, 8),), 16, torch.float32)
RULE: Final = AttentionRule(scale=1.0)

#: A decode of token 4, and a chunk of tokens 15 to 17, in two blocks each.
ROWS: Final = StepRows(
    decodes=1,
    query_lengths=(1, 3),
    context_lengths=(5, 18),
    tables=torch.tensor([[0, 3], [1, 2]], dtype=torch.int32),
    write_slots=torch.tensor([4, 31, 32, 33]),
)


@pytest.fixture
def backend() -> CpuBackend:
    need_cpu_library()
    return CpuBackend()


@pytest.fixture
def cache(backend: CpuBackend) -> KvCache:
    return KvCache(SHAPE, torch.zeros(5, backend.layout(SHAPE).elements))


@pytest.fixture
def prepared(backend: CpuBackend, cache: KvCache) -> PreparedStep:
    return backend.prepare(cache, ROWS)


def states(rows: int = 4, heads: int = 2, size: int = 16, device: str = "cpu") -> Tensor:
    return torch.zeros(rows, heads, size, device=device)


def test_what_fits_is_done(backend: CpuBackend, prepared: PreparedStep) -> None:
    """Or the tests below would prove nothing."""
    backend.write_kv(prepared, 0, states(), states(size=8))
    assert backend.paged_attention(prepared, 0, states(heads=4), RULE).shape == (4, 4, 8)


@pytest.mark.parametrize(
    ("changed", "error", "reason"),
    [
        ({"tables": ROWS.tables.long()}, TypeError, r"tables are of torch.int64, not of torch.int32"),
        ({"tables": ROWS.tables.to("meta")}, TypeError, "tables lie on meta"),
        ({"tables": ROWS.tables[:1]}, ValueError, r"2 sequences with tables of \[1, 2\] and 2 contexts"),
        ({"tables": ROWS.tables[0]}, ValueError, r"2 sequences with tables of \[2\]"),
        ({"tables": ROWS.tables[:, :1]}, ValueError, "a context of 18 in a table of 1 blocks of 16"),
        ({"write_slots": ROWS.write_slots.int()}, TypeError, r"slots are of torch.int32, not of torch.int64"),
        ({"write_slots": ROWS.write_slots.to("meta")}, TypeError, "slots lie on meta"),
        ({"write_slots": ROWS.write_slots[1:]}, ValueError, r"slots of \[3\] for 4 rows"),
        ({"write_slots": ROWS.write_slots[:, None]}, ValueError, r"slots of \[4, 1\] for 4 rows"),
        ({"context_lengths": (5,)}, ValueError, r"2 sequences with tables of \[2, 2\] and 1 contexts"),
        ({"context_lengths": (5, 33)}, ValueError, "a context of 33 in a table of 2 blocks"),
        ({"context_lengths": (5, 2)}, ValueError, "shorter than they are"),
        ({"query_lengths": (0, 4)}, ValueError, "a sequence has no rows"),
        ({"query_lengths": (-1, 5)}, ValueError, "a sequence has no rows"),
        ({"decodes": 2}, ValueError, "the first 2 of 2 sequences are not decodes"),
        ({"decodes": 3}, ValueError, "the first 3 of 2 sequences"),
        ({"decodes": -1}, ValueError, "the first -1 of 2 sequences"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit(
    backend: CpuBackend, cache: KvCache, changed: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        backend.prepare(cache, replace(ROWS, **changed))


def test_a_pool_that_does_not_fit(backend: CpuBackend, cache: KvCache) -> None:
    frames = cache.frames
    for bad, error, reason in (
        (frames.half(), TypeError, r"frames are of torch.float16, not of torch.float32"),
        (frames.to("meta"), TypeError, "frames lie on meta"),
        (frames.T.contiguous().T, ValueError, r"are not \[frames, elements\], contiguous"),
        (frames.flatten(), ValueError, r"are not \[frames, elements\], contiguous"),
        (frames[:, :-1].contiguous(), ValueError, f"frames of 1023 elements are not of this layout, which has {frames.shape[1]}"),
    ):
        with pytest.raises(error, match=reason):
            backend.prepare(KvCache(SHAPE, bad), ROWS)
    for shape in (
        replace(SHAPE, block_size=0),
        replace(SHAPE, block_size=-16),
        *(replace(SHAPE, layers=(LayerShape(*sizes),)) for sizes in ((0, 16, 8), (2, 0, 8), (2, 16, -8))),
    ):
        with pytest.raises(ValueError, match="none of these can be nothing"):
            backend.layout(shape)
    with pytest.raises(TypeError, match=r"pools of torch.float64 are not for the CPU's kernels"):
        backend.layout(replace(SHAPE, dtype=torch.float64))


def test_keys_and_values_that_do_not_fit(backend: CpuBackend, prepared: PreparedStep) -> None:
    keys, values = states(), states(size=8)
    for bad in states(rows=3), states(heads=1), states(size=8), keys.flatten(1), keys[0, 0]:
        with pytest.raises(ValueError, match=r"keys of \[.*\] are not \[4, 2, 16\]: rows, heads, elements"):
            backend.write_kv(prepared, 0, bad, values)
    for bad in states(rows=5, size=8), keys, values[0]:
        with pytest.raises(ValueError, match=r"values of \[.*\] are not \[4, 2, 8\]: rows, heads, elements"):
            backend.write_kv(prepared, 0, keys, bad)
    with pytest.raises(TypeError, match="keys lie on meta, not on the CPU"):
        backend.write_kv(prepared, 0, states(device="meta"), values)
    with pytest.raises(TypeError, match="values lie on meta, not on the CPU"):
        backend.write_kv(prepared, 0, keys, states(size=8, device="meta"))
    assert int(prepared.cache.frames.count_nonzero()) == 0


def test_queries_and_sinks_that_do_not_fit(backend: CpuBackend, prepared: PreparedStep) -> None:
    for bad in states(rows=3), states(heads=0), states(heads=3), states(size=8), states().flatten(1), states()[0, 0]:
        with pytest.raises(ValueError, match=r"queries of \[.*\] are not \[4, a multiple of 2, 16\]"):
            backend.paged_attention(prepared, 0, bad, RULE)
    with pytest.raises(TypeError, match="queries lie on meta, not on the CPU"):
        backend.paged_attention(prepared, 0, states(device="meta"), RULE)
    for sinks in torch.zeros(1), torch.zeros(2, 1), torch.zeros(4):
        with pytest.raises(ValueError, match=r"sinks of \[.*\] for 2 query heads"):
            backend.paged_attention(prepared, 0, states(), AttentionRule(1.0, sinks=sinks))


def test_moves_and_frames_that_do_not_fit(backend: CpuBackend, cache: KvCache) -> None:
    frames = cache.frames
    refused: list[tuple[Callable[[], None], type[Exception], str]] = [
        (lambda: backend.copy_blocks(cache, [(0, 1, 2)]), ValueError, "moves are pairs"),  # type: ignore[list-item]
        (lambda: backend.copy_blocks(cache, [(0, 5)]), ValueError, "name one that is not there"),
        (lambda: backend.copy_blocks(cache, [(5, 0)]), ValueError, "name one that is not there"),
        (lambda: backend.copy_blocks(cache, [(0, 1), (-1, 2)]), ValueError, "name one that is not there"),
        (lambda: backend.swap_blocks(frames, frames[:2], [(0, 2)]), ValueError, "among 5 and 2 frames"),
        (lambda: backend.swap_blocks(frames.repeat(1, 2)[:, ::2], frames, [(0, 1)]), ValueError, "elements side by side"),
        (lambda: backend.swap_blocks(frames, frames.flatten(), [(0, 1)]), ValueError, "elements side by side"),
        (lambda: backend.swap_blocks(frames, frames[:, 1:], [(0, 1)]), ValueError, "1024 elements do not go into frames of 1023"),
        (lambda: backend.swap_blocks(frames, frames.half(), [(0, 1)]), TypeError, "do not go into frames of torch.float16"),
        (lambda: backend.swap_blocks(frames.to("meta"), frames, [(0, 1)]), TypeError, "frames lie on meta"),
    ]
    for call, error, reason in refused:
        with pytest.raises(error, match=reason):
            call()


def test_a_call_that_was_not_done_is_an_error() -> None:
    library.check(library.DONE)
    with pytest.raises(RuntimeError, match="refused a call: status 2"):
        library.check(library.WORKSPACE_TOO_SMALL)


def test_nothing_that_protects_memory_is_an_assert() -> None:
    """`python -O` leaves asserts out, and here an address would go to C unchecked."""
    modules = list(Path(kernels.cpu.__file__).parent.glob("*.py"))
    assert {"backend.py", "operations.py", "program.py"} <= {module.name for module in modules}
    assert not [
        (module.name, node.lineno)
        for module in modules
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Assert)
    ]
