"""What every backend must do, by name: edges, odd sizes, several layers, whatever hypothesis comes to; copies and writes."""

import math
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.interface import AttentionRule, CacheShape, KvCache, LayerShape
from kernels.reference import ReferenceBackend
from tests.kernels import backends
from tests.kernels.attention_oracle import LIMITS, attend
from tests.kernels.backends import Subject
from tests.kernels.cases import Case, Sequence, check, float64, rows_of, tables_of, threads

every_backend = pytest.mark.parametrize("subject", backends.parameters(), indirect=True)

#: Without the interpreter, for whom these would take minutes.
every_fast_backend = pytest.mark.parametrize("subject", backends.parameters([*backends.NATIVE, "triton-gpu"]), indirect=True)


def edges(block_size: int) -> list[int]:
    """Return lengths around the edges of a block."""
    return sorted({0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size})


# --------------------------------------------------------------------------------------------------------------- cases


@every_fast_backend
@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (2, 8)])
def test_lengths_at_the_edges_of_blocks(subject: Subject, block_size: int, kv_heads: int, group: int) -> None:
    lengths = edges(block_size)
    decodes = [Sequence(past, 1) for past in lengths]
    chunks = [Sequence(past, rows) for past in lengths for rows in lengths[2:4] if rows > 1]
    case = Case((*chunks, *decodes), (LayerShape(kv_heads, 8, 8),), group=group, block_size=block_size)
    check(subject.backend, case, subject.device)


@every_backend
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize(("key_size", "value_size"), [(64, 64), (5, 5), (1, 1), (24, 16), (80, 80)])
def test_sizes_and_dtypes(subject: Subject, dtype: torch.dtype, key_size: int, value_size: int) -> None:
    sequences = (Sequence(9, 1), Sequence(0, 6), Sequence(30, 1), Sequence(5, 4))
    layers = (LayerShape(2, key_size, value_size), LayerShape(2, key_size, value_size))
    check(subject.backend, Case(sequences, layers, group=3, dtype=dtype, block_size=16), subject.device)


@every_backend
def test_layers_of_different_shapes(subject: Subject) -> None:
    layers = (LayerShape(1, 4, 4), LayerShape(4, 8, 2), LayerShape(2, 16, 16))
    check(subject.backend, Case((Sequence(9, 1), Sequence(3, 7)), layers, group=2), subject.device)


@every_fast_backend
@pytest.mark.parametrize("window", [1, 2, 5, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_caps_and_sinks(subject: Subject, window: int | None, softcap: float | None, sinks: bool) -> None:
    sequences = (Sequence(0, 1), Sequence(4, 1), Sequence(21, 1), Sequence(0, 9), Sequence(13, 6))
    case = Case(sequences, (LayerShape(2, 8, 8),), group=2, window=window, softcap=softcap, sinks=sinks)
    check(subject.backend, case, subject.device)


@every_fast_backend
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32 + 1])
def test_a_window_longer_than_any_context_is_none(subject: Subject, window: int) -> None:
    case = Case((Sequence(70, 1), Sequence(13, 6)), (LayerShape(2, 8, 8),), window=window)
    check(subject.backend, case, subject.device)


@every_backend
@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_scores_that_only_a_peak_subtracted_can_take(subject: Subject, offset: float) -> None:
    """exp(200) is no float32, and exp(-200) is zero: a sum over either would be lost."""
    shape = CacheShape((LayerShape(1, 32, 32),), 16, torch.float32)
    backend, device = subject.backend, subject.device
    cache = KvCache(shape, torch.full((4, backend.layout(shape).elements), math.nan, device=device))
    rows = rows_of([Sequence(0, 20)], [[2, 0]], 16, cache.scratch, device)
    prepared = backend.prepare(cache, rows)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20, 1, 32, generator=generator)
    keys = torch.full((20, 1, 32), offset / 32)
    backend.write_kv(prepared, 0, keys.to(device), values.to(device))
    found = backend.paged_attention(prepared, 0, torch.ones(20, 2, 32, device=device), AttentionRule(scale=1.0))
    means = values.cumsum(0) / torch.arange(1, 21)[:, None, None]  # all scores are alike
    torch.testing.assert_close(found.cpu(), means.expand(20, 2, 32), atol=1e-5, rtol=1e-5)


#: numpy's warnings where Triton's interpreter comes to infinity or NaN, as a GPU does without a word.
INTERPRETED_WARNS: Final = "ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"

#: Scores of tokens, the first ones and then all others, of a context that is several tiles and several splits long.
_STRANGE_SCORES: Final = {
    "very low": (-1e35, -1e35),
    "very low and lower": (-3e35, -2e35),
    "the lowest": (-2e38, -2e38),
    "low before what is usual": (-1e35, 1.0),
    "usual before low": (1.0, -1e35),
    "very high": (1e35, 1e35),
    "the highest beside the lowest": (2e38, -2e38),
    "nothing before what is usual": (-math.inf, 1.0),
    "usual before nothing": (1.0, -math.inf),
    "nothing before very low": (-math.inf, -1e35),
    "nothing": (-math.inf, -math.inf),
    "too much": (1.0, math.inf),
    "too much before what is usual": (math.inf, 1.0),
    "no number": (1.0, math.nan),
    "no number before what is usual": (math.nan, 1.0),
}


def attended_with(
    subject: Subject, scores: tuple[float, float] | Tensor, rule: AttentionRule, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return what two query heads come to, as [rows, heads, size], and what the oracle says.

    The score is the first element of a key: the first of two is that of the first 170 of 300 tokens. The rows are a chunk around
    that place, and a decode at the end.
    """
    backend, device = subject.backend, subject.device
    shape = CacheShape((LayerShape(1, 16, 16),), 16, dtype)
    values = torch.randn(300, 1, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = torch.zeros(300, 1, 16, dtype=dtype)
    if isinstance(scores, Tensor):
        keys[:, 0, 0] = scores.to(dtype)
    else:
        keys[:170, 0, 0], keys[170:, 0, 0] = scores
    queries = torch.zeros(12, 2, 16, dtype=dtype)
    queries[..., 0] = 1.0
    cache = KvCache(shape, torch.full((20, backend.layout(shape).elements), math.nan, dtype=dtype, device=device))
    everything = rows_of([Sequence(0, 300)], [list(range(19))], 16, cache.scratch, device)
    backend.write_kv(backend.prepare(cache, everything), 0, keys.to(device), values.to(device))
    steps = [Sequence(299, 1), Sequence(165, 11)]
    own = replace(rule, sinks=None if rule.sinks is None else rule.sinks.to(device))
    rows = rows_of(steps, [list(range(19))] * 2, 16, cache.scratch, device)
    found = backend.paged_attention(backend.prepare(cache, rows), 0, queries.to(device), own).cpu()
    with np.errstate(invalid="ignore"):
        expected = [
            attend(float64(queries[: step.rows]), float64(keys[: step.context]), float64(values[: step.context]), rule)
            for step in steps
        ]
    return found, torch.from_numpy(np.concatenate(expected))


@every_backend
@pytest.mark.filterwarnings(INTERPRETED_WARNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", _STRANGE_SCORES)
def test_scores_far_from_any_usual_one(subject: Subject, name: str, window: int | None, dtype: torch.dtype) -> None:
    """As the oracle in float64 has them, NaN where it has NaN, whichever tile, split or thread meets them first."""
    for count in 1, 3:
        with threads(count):
            rule = AttentionRule(scale=1.0, window=window)
            found, expected = attended_with(subject, _STRANGE_SCORES[name], rule, dtype)
        torch.testing.assert_close(found.double(), expected, atol=LIMITS[dtype], rtol=LIMITS[dtype], equal_nan=True)


#: What scores do from token to token, over several tiles: whether a maximum is taken anew must not show.
_COURSES: Final[dict[str, Tensor]] = {
    "rising a little": torch.linspace(-2, 2, 300),
    "rising by powers": torch.linspace(-40, 40, 300),
    "rising steeply": torch.linspace(-1000, 1000, 300),
    "falling by powers": torch.linspace(40, -40, 300),
    "falling steeply": torch.linspace(1000, -1000, 300),
    "up and down": 30 * torch.linspace(0, 12, 300).sin(),
    "one step that is just no leap": torch.where(torch.arange(300) < 150, 0.0, 5.5),
    "one step that is just a leap": torch.where(torch.arange(300) < 150, 0.0, 5.6),
}


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _COURSES)
def test_scores_that_rise_and_fall_along_the_context(subject: Subject, name: str, dtype: torch.dtype) -> None:
    rule = AttentionRule(scale=1.0, sinks=torch.tensor([3.0, -3.0]))
    found, expected = attended_with(subject, _COURSES[name], rule, dtype)
    torch.testing.assert_close(found.double(), expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])


@every_backend
@pytest.mark.filterwarnings(INTERPRETED_WARNS)
@pytest.mark.parametrize("sink", [-math.inf, math.inf, math.nan, -1e35, 1e35, 0.0])
@pytest.mark.parametrize("scores", [(1.0, 2.0), (-1e35, -1e35), (-math.inf, -math.inf), (1.0, math.inf)], ids=str)
def test_sinks_far_from_any_usual_one(subject: Subject, sink: float, scores: tuple[float, float]) -> None:
    """One head has that sink, and its neighbour an ordinary one."""
    rule = AttentionRule(scale=1.0, sinks=torch.tensor([sink, 0.5]))
    found, expected = attended_with(subject, scores, rule)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_the_oracle_knows_the_edges() -> None:
    """What the two tests above compare with, by hand: one row, three tokens that are alike."""
    values = np.array([1.0, 2.0, 6.0]).reshape(3, 1, 1)

    def found(score: float, sink: float | None) -> float:
        rule = AttentionRule(scale=1.0, sinks=None if sink is None else torch.tensor([sink]))
        with np.errstate(invalid="ignore"):
            return float(attend(np.ones((1, 1, 1)), np.full((3, 1, 1), score), values, rule)[0, 0, 0])

    assert found(-1e35, None) == found(0.0, -math.inf) == 3.0
    assert found(0.0, 1e35) == found(-math.inf, 0.0) == 0.0
    assert found(-(2.0**116), -(2.0**116)) == 9 / 4
    for nothing in found(-math.inf, None), found(-math.inf, -math.inf), found(0.0, math.inf), found(0.0, math.nan):
        assert math.isnan(nothing)


@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_the_reference_splits_work_where_it_is_large(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_ELEMENTS", limit)
    monkeypatch.setattr(reference, "_SHORT", 1)
    sequences = (Sequence(30, 1), Sequence(3, 1), Sequence(17, 1), Sequence(12, 11), Sequence(0, 5))
    check(ReferenceBackend(), Case(sequences, (LayerShape(2, 8, 8),), group=2, sinks=True, window=15))


lengths = st.integers(0, 40)

# Values of eight elements and more: a row of fewer may be near zero altogether, and then no error is small beside it.
layer_shapes = st.builds(LayerShape, st.integers(1, 3), st.integers(1, 18), st.integers(8, 18))

any_case: st.SearchStrategy[Case] = st.builds(
    Case,
    sequences=st.lists(st.builds(Sequence, past=lengths, rows=st.integers(1, 12)), min_size=1, max_size=6).map(tuple),
    layers=st.lists(layer_shapes, min_size=1, max_size=2).map(tuple),
    group=st.integers(1, 5),
    block_size=st.integers(1, 20),
    dtype=st.sampled_from(list(LIMITS)),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.one_of(st.none(), st.just(3.0)),
    sinks=st.booleans(),
    scatter=st.sampled_from(["ordered", "shuffled", "sparse"]),
    strides=st.sampled_from(["contiguous", "joined", "transposed", "spread"]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)


@every_fast_backend
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=any_case)
def test_any_mix(subject: Subject, case: Case) -> None:
    check(subject.backend, case, subject.device)


@every_backend
def test_a_neighbours_nan_stays_with_it(subject: Subject) -> None:
    """A sequence whose own K or V are NaN yields NaN, and nobody else does."""
    backend, device = subject.backend, subject.device
    sequences = [Sequence(5, 1), Sequence(9, 1), Sequence(2, 4)]
    tables = tables_of([2, 3, 2], "sparse", seed=0)
    shape = CacheShape((LayerShape(1, 4, 4),), 4, torch.float32)
    cache = KvCache(shape, torch.rand(20, backend.layout(shape).elements, device=device))
    rows = rows_of(sequences, tables, 4, cache.scratch, device)
    prepared = backend.prepare(cache, rows)
    cache.frames[tables[1][0]] = math.nan
    backend.write_kv(prepared, 0, torch.zeros(6, 1, 4, device=device), torch.zeros(6, 1, 4, device=device))
    found = backend.paged_attention(prepared, 0, torch.ones(6, 2, 4, device=device), AttentionRule(scale=1.0))
    assert found[1].isnan().all()
    assert not found[[0, 2, 3, 4, 5]].isnan().any()


@every_fast_backend
def test_blocks_behind_the_two_thousand_millionth_element_are_like_the_first(subject: Subject) -> None:
    """Of the pool's five gigabytes only the pages of four blocks are ever touched: the rest costs no memory on a CPU."""
    backend, device = subject.backend, subject.device
    shape = CacheShape((LayerShape(8, 128, 128),), 16, torch.bfloat16)
    elements = backend.layout(shape).elements
    last = 2**31 // elements + 20_000
    cache = KvCache(shape, torch.empty(last + 2, elements, dtype=torch.bfloat16, device=device))
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(20, 8, 128, generator=generator).bfloat16().to(device) for _ in range(2))
    queries = torch.randn(20, 8, 128, generator=generator).bfloat16().to(device)
    outputs = []
    for table in [0, 1], [last, last - 1]:
        rows = rows_of([Sequence(0, 20)], [table], 16, cache.scratch, device)
        prepared = backend.prepare(cache, rows)
        backend.write_kv(prepared, 0, keys, values)
        outputs.append(backend.paged_attention(prepared, 0, queries, AttentionRule(scale=128**-0.5)))
    assert (last - 1) * elements > 2**31
    assert torch.equal(*outputs)
    backend.copy_blocks(cache, [(last, 1), (0, last - 1)])
    assert torch.equal(cache.frames[1], cache.frames[last])
    assert torch.equal(cache.frames[0], cache.frames[last - 1])


# ----------------------------------------------------------------------------------------------------------- the frames


@every_backend
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_copies_are_of_whole_frames(subject: Subject, dtype: torch.dtype) -> None:
    backend, device = subject.backend, subject.device
    shape = CacheShape((LayerShape(2, 3, 5), LayerShape(1, 2, 2)), 3, dtype)
    frames = torch.randn(7, backend.layout(shape).elements).to(device, dtype)
    before = frames.clone()
    backend.copy_blocks(KvCache(shape, frames), [(0, 4), (0, 2), (5, 1)])
    expected = before.clone()
    expected[[4, 2, 1]] = before[[0, 0, 5]]
    assert torch.equal(frames, expected)


@every_backend
def test_no_copies_are_none(subject: Subject) -> None:
    backend, device = subject.backend, subject.device
    shape = CacheShape((LayerShape(1, 8, 8),), 4, torch.float32)
    frames = torch.randn(3, backend.layout(shape).elements).to(device)
    before = frames.clone()
    backend.copy_blocks(KvCache(shape, frames), [])
    backend.swap_blocks(frames, torch.zeros_like(frames, device="cpu"), [])
    assert torch.equal(frames, before)


@every_backend
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_frames_go_to_the_host_and_come_back(subject: Subject, dtype: torch.dtype) -> None:
    backend, device = subject.backend, subject.device
    frames = torch.randn(5, 37).to(device, dtype)
    host = torch.zeros(3, 37, dtype=dtype, pin_memory=device == "cuda")
    before = frames.clone()
    backend.swap_blocks(frames, host, [(0, 2), (4, 1)])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, torch.stack([torch.zeros(37, dtype=dtype), before[4].cpu(), before[0].cpu()]))
    backend.swap_blocks(host, frames, [(2, 3), (1, 0), (2, 1)])
    assert torch.equal(frames, before[[4, 0, 2, 0, 4]])


@every_fast_backend
def test_many_large_frames_are_copied_by_several_threads(subject: Subject) -> None:
    """Of a size that no thread's share comes out even."""
    backend, device = subject.backend, subject.device
    shape = CacheShape((LayerShape(3, 80, 80),), 16, torch.bfloat16)
    frames = torch.randn(40, backend.layout(shape).elements).to(device, torch.bfloat16)
    host = torch.zeros(20, frames.shape[1], dtype=torch.bfloat16, pin_memory=device == "cuda")
    before = frames.clone()
    moves = [(2 * number, 19 - number) for number in range(19)]
    with threads(3):
        backend.swap_blocks(frames, host, moves)
        backend.swap_blocks(host, frames, [(place, block) for block, place in moves])
        assert torch.equal(frames, before)
        backend.copy_blocks(KvCache(shape, frames), [(block, block + 1) for block, _ in moves])
    assert torch.equal(host[1:].cpu(), before[:38:2].flip(0).cpu())
    assert int(host[0].count_nonzero()) == 0
    assert torch.equal(frames[1:38:2], before[:38:2])
    assert torch.equal(frames[:38:2], before[:38:2])


@every_backend
def test_a_write_touches_its_slots_only(subject: Subject) -> None:
    """In a pool of zeros, and of a block that is full but for one slot: its neighbours stay what they were."""
    backend, device = subject.backend, subject.device
    shape = CacheShape((LayerShape(2, 3, 3), LayerShape(2, 3, 3)), 4, torch.float32)
    cache = KvCache(shape, torch.zeros(5, backend.layout(shape).elements, device=device))
    rows = rows_of([Sequence(3, 1), Sequence(0, 2)], [[2], [0]], 4, cache.scratch, device)
    backend.write_kv(backend.prepare(cache, rows), 1, torch.ones(3, 2, 3, device=device), torch.ones(3, 2, 3, device=device))
    assert int((cache.frames != 0).sum()) == 3 * 2 * (3 + 3)
    assert int(cache.frames[[1, 3, 4]].count_nonzero()) == 0
    before = cache.frames.clone()
    rows = rows_of([Sequence(2, 1)], [[2]], 4, cache.scratch, device)
    backend.write_kv(backend.prepare(cache, rows), 1, torch.ones(1, 2, 3, device=device), torch.ones(1, 2, 3, device=device))
    assert int((cache.frames != before).sum()) == 2 * (3 + 3)


@every_backend
def test_a_frame_is_no_larger_than_its_tokens(subject: Subject) -> None:
    shape = CacheShape((LayerShape(3, 64, 64),) * 30, 16, torch.bfloat16)
    assert subject.backend.layout(shape).frame_bytes(torch.bfloat16) == 2 * 30 * 3 * 64 * 16 * 2
