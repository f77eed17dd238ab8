"""Every backend against the float64 oracle, in a pool full of NaN: what was not written must not reach an output."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.interface import AttentionBackend, AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from kernels.reference import PreparedStep, ReferenceBackend
from tests.kernels.attention_oracle import Floats, attend

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Sequence:
    """`rows` tokens to compute behind `past` ones."""

    past: int
    rows: int

    @property
    def context(self) -> int:
        return self.past + self.rows


@dataclass(frozen=True)
class Case:
    """A step over some sequences."""

    sequences: tuple[Sequence, ...]
    layers: tuple[LayerShape, ...]
    group: int = 1  # query heads for each KV head
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0


def backend() -> AttentionBackend[PreparedStep]:
    return ReferenceBackend()


def run(case: Case) -> None:
    """Write the pasts, then the step's rows, attend, and compare each layer with the oracle."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    ordered = sorted(case.sequences, key=lambda sequence: sequence.rows > 1)
    tables = scatter([-(-sequence.context // case.block_size) for sequence in ordered], generator)
    shape = CacheShape(case.layers, case.block_size, case.dtype)
    attention = backend()
    blocks = sum(len(table) for table in tables) + 3
    cache = KvCache(shape, torch.full((blocks + 1, attention.layout(shape).elements), math.nan, dtype=case.dtype))
    written = [
        [tuple(random(one.context, own.kv_heads, size) for size in (own.key_size, own.value_size)) for one in ordered]
        for own in case.layers
    ]
    for layer, states in enumerate(written):
        for sequence, table, (keys, values) in zip(ordered, tables, states, strict=True):
            if sequence.past:
                past = rows_of([Sequence(0, sequence.past)], [table], case.block_size, cache.scratch)
                attention.write_kv(attention.prepare(cache, past), layer, keys[: sequence.past], values[: sequence.past])

    rows = rows_of(ordered, tables, case.block_size, cache.scratch)
    prepared = attention.prepare(cache, rows)
    for layer, (own, states) in enumerate(zip(case.layers, written, strict=True)):
        fresh = [tuple(part[s.past :] for part in state) for s, state in zip(ordered, states, strict=True)]
        attention.write_kv(prepared, layer, torch.cat([keys for keys, _ in fresh]), torch.cat([values for _, values in fresh]))
        q_heads = own.kv_heads * case.group
        rule = AttentionRule(
            scale=own.key_size**-0.5,
            window=case.window,
            softcap=case.softcap,
            sinks=random(q_heads) if case.sinks else None,
        )
        # Strided, as a model hands them over.
        queries = random(q_heads, len(rows.write_slots), own.key_size).transpose(0, 1)
        found = attention.paged_attention(prepared, layer, queries, rule)
        assert found.dtype == case.dtype
        assert found.is_contiguous()
        expected = [
            attend(float64(queries[start : start + sequence.rows]), float64(keys), float64(values), rule)
            for start, sequence, (keys, values) in zip(starts(ordered), ordered, states, strict=True)
        ]
        np.testing.assert_allclose(
            found.double().numpy(), np.concatenate(expected), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
        )


def float64(tensor: Tensor) -> Floats:
    found: Floats = tensor.double().numpy()
    return found


def scatter(lengths: list[int], generator: torch.Generator) -> list[list[int]]:
    """Return a table for each length, of blocks in no order; the first two blocks belong to nobody."""
    order = (torch.randperm(sum(lengths), generator=generator) + 2).tolist()
    return [[order.pop() for _ in range(length)] for length in lengths]


def rows_of(sequences: list[Sequence], tables: list[list[int]], block_size: int, scratch: int) -> StepRows:
    width = max(len(table) for table in tables)
    return StepRows(
        decodes=sum(sequence.rows == 1 for sequence in sequences),
        query_lengths=tuple(sequence.rows for sequence in sequences),
        context_lengths=tuple(sequence.context for sequence in sequences),
        tables=torch.tensor([table + [scratch] * (width - len(table)) for table in tables], dtype=torch.int32),
        write_slots=torch.tensor(
            [
                table[position // block_size] * block_size + position % block_size
                for sequence, table in zip(sequences, tables, strict=True)
                for position in range(sequence.past, sequence.context)
            ]
        ),
    )


def starts(sequences: list[Sequence]) -> list[int]:
    ends = np.cumsum([sequence.rows for sequence in sequences])
    return [0, *ends[:-1].tolist()]


def edges(block_size: int) -> list[int]:
    """Return lengths around the edges of a block."""
    return sorted({0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size})


# --------------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (2, 8)])
def test_lengths_at_the_edges_of_blocks(block_size: int, kv_heads: int, group: int) -> None:
    lengths = edges(block_size)
    decodes = [Sequence(past, 1) for past in lengths]
    chunks = [Sequence(past, rows) for past in lengths for rows in lengths[2:4] if rows > 1]
    run(Case((*chunks, *decodes), (LayerShape(kv_heads, 8, 8),), group=group, block_size=block_size))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("key_size", "value_size"), [(64, 64), (5, 5), (1, 1), (24, 16), (80, 80)])
def test_sizes_and_dtypes(dtype: torch.dtype, key_size: int, value_size: int) -> None:
    run(
        Case(
            (Sequence(9, 1), Sequence(0, 6), Sequence(30, 1), Sequence(5, 4)),
            (LayerShape(2, key_size, value_size), LayerShape(2, key_size, value_size)),
            group=3,
            dtype=dtype,
        )
    )


def test_layers_of_different_shapes() -> None:
    run(Case((Sequence(9, 1), Sequence(3, 7)), (LayerShape(1, 4, 4), LayerShape(4, 8, 2), LayerShape(2, 16, 16)), group=2))


@pytest.mark.parametrize("window", [1, 2, 5, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_caps_and_sinks(window: int | None, softcap: float | None, sinks: bool) -> None:
    sequences = (Sequence(0, 1), Sequence(4, 1), Sequence(21, 1), Sequence(0, 9), Sequence(13, 6))
    run(Case(sequences, (LayerShape(2, 8, 8),), group=2, window=window, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_work_is_split_where_it_is_large(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_ELEMENTS", limit)
    monkeypatch.setattr(reference, "_SHORT", 1)
    sequences = (Sequence(30, 1), Sequence(3, 1), Sequence(17, 1), Sequence(12, 11), Sequence(0, 5))
    run(Case(sequences, (LayerShape(2, 8, 8),), group=2, sinks=True, window=15))


lengths = st.integers(0, 40)


@settings(deadline=None, max_examples=60)
@given(
    case=st.builds(
        Case,
        sequences=st.lists(st.builds(Sequence, past=lengths, rows=st.integers(1, 12)), min_size=1, max_size=6).map(tuple),
        layers=st.builds(LayerShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)).map(lambda layer: (layer, layer)),
        group=st.integers(1, 4),
        block_size=st.integers(1, 20),
        dtype=st.sampled_from(list(TOLERANCE)),
        window=st.one_of(st.none(), st.integers(1, 30)),
        softcap=st.one_of(st.none(), st.just(3.0)),
        sinks=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
)
def test_any_mix(case: Case) -> None:
    run(case)


def test_a_neighbours_nan_stays_with_it() -> None:
    """A sequence whose own K or V are NaN yields NaN, and nobody else does."""
    generator = torch.Generator().manual_seed(0)
    sequences = [Sequence(5, 1), Sequence(9, 1), Sequence(2, 4)]
    tables = scatter([2, 3, 2], generator)
    shape = CacheShape((LayerShape(1, 4, 4),), 4, torch.float32)
    attention = backend()
    cache = KvCache(shape, torch.randn(12, attention.layout(shape).elements, generator=generator))
    rows = rows_of(sequences, tables, 4, cache.scratch)
    prepared = attention.prepare(cache, rows)
    cache.frames[tables[1][0]] = math.nan
    attention.write_kv(prepared, 0, torch.zeros(6, 1, 4), torch.zeros(6, 1, 4))
    found = attention.paged_attention(prepared, 0, torch.ones(6, 2, 4), AttentionRule(scale=1.0))
    assert found[1].isnan().all()
    assert not found[[0, 2, 3, 4, 5]].isnan().any()


def test_copies_are_of_whole_frames() -> None:
    shape = CacheShape((LayerShape(2, 3, 5), LayerShape(1, 2, 2)), 3, torch.float32)
    attention = backend()
    frames = torch.randn(7, attention.layout(shape).elements)
    before = frames.clone()
    attention.copy_blocks(KvCache(shape, frames), [(0, 4), (0, 2), (5, 1)])
    expected = before.clone()
    expected[[4, 2, 1]] = before[[0, 0, 5]]
    assert torch.equal(frames, expected)


def test_frames_go_to_the_host_and_come_back() -> None:
    attention = backend()
    frames, host = torch.randn(5, 37), torch.zeros(3, 37)
    before = frames.clone()
    attention.swap_blocks(frames, host, [(0, 2), (4, 1)])
    assert torch.equal(host, torch.stack([torch.zeros(37), before[4], before[0]]))
    attention.swap_blocks(host, frames, [(2, 3), (1, 0), (2, 1)])
    assert torch.equal(frames, before[[4, 0, 2, 0, 4]])


def test_blocks_behind_the_two_thousand_millionth_element_are_like_the_first() -> None:
    """Of the pool's five gigabytes only the pages of four blocks are ever touched: the rest costs no memory."""
    shape = CacheShape((LayerShape(8, 128, 128),), 16, torch.bfloat16)
    attention = backend()
    elements = attention.layout(shape).elements
    last = 2**31 // elements + 20_000
    cache = KvCache(shape, torch.empty(last + 2, elements, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(20, 8, 128, generator=generator).bfloat16() for _ in range(2))
    queries = torch.randn(20, 8, 128, generator=generator).bfloat16()
    outputs = []
    for table in [0, 1], [last, last - 1]:
        rows = rows_of([Sequence(0, 20)], [table], 16, cache.scratch)
        prepared = attention.prepare(cache, rows)
        attention.write_kv(prepared, 0, keys, values)
        outputs.append(attention.paged_attention(prepared, 0, queries, AttentionRule(scale=128**-0.5)))
    assert (last - 1) * elements > 2**31
    assert torch.equal(*outputs)
    attention.copy_blocks(cache, [(last, 1), (0, last - 1)])
    assert torch.equal(cache.frames[1], cache.frames[last])
    assert torch.equal(cache.frames[0], cache.frames[last - 1])


def test_a_write_touches_its_slots_only() -> None:
    shape = CacheShape((LayerShape(2, 3, 3), LayerShape(2, 3, 3)), 4, torch.float32)
    attention = backend()
    cache = KvCache(shape, torch.zeros(5, attention.layout(shape).elements))
    rows = rows_of([Sequence(3, 1), Sequence(0, 2)], [[2], [0]], 4, cache.scratch)
    attention.write_kv(attention.prepare(cache, rows), 1, torch.ones(3, 2, 3), torch.ones(3, 2, 3))
    assert int((cache.frames != 0).sum()) == 3 * 2 * (3 + 3)
    assert cache.frames[[1, 3, 4]].count_nonzero() == 0


def test_a_frame_is_no_larger_than_its_tokens() -> None:
    shape = CacheShape((LayerShape(3, 64, 64),) * 30, 16, torch.bfloat16)
    assert backend().layout(shape).frame_bytes(torch.bfloat16) == 2 * 30 * 3 * 64 * 16 * 2
