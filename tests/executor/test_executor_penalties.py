"""Bias, penalties and ends that come too early, against plain Python in float64; with the draw by torch and by the kernels."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.errors import PlanError
from executor.native import native_draw
from executor.penalties import Changes, History, Row, change, read_changes, read_history
from executor.sampler import Draw, DrawRows, Sampling, sample, torch_draw, torch_peaks
from kernels.cpu import library
from kernels.cpu.operations import Operations
from kilburn.v1 import engine_pb2 as wire
from tests.executor.sampler_oracle import changed, kept, sums

WAYS: dict[str, Callable[[], DrawRows]] = {"torch": lambda: torch_draw}
if not library.why_missing():
    WAYS |= {name: lambda name=name: native_draw(Operations(name)) for name in library.instructions()}  # type: ignore[misc]


@pytest.fixture(scope="module", params=WAYS)
def draw_rows(request: pytest.FixtureRequest) -> DrawRows:
    return WAYS[request.param]()


def sampling(changes: Changes | None, temperature: float = 1.0, **rest: Any) -> Sampling:
    fields: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "with_logprobs": False, "top_logprobs": 0}
    return Sampling(temperature=temperature, changes=changes, **{**fields, **rest})


def history_of(prompt: list[int], outputs: list[int], *, counts_prompt: bool) -> History:
    counts = Counter(outputs)
    given = np.unique(np.array(prompt if counts_prompt else [], dtype=np.int64))
    return History(given, np.array(list(counts), dtype=np.int64), np.array(list(counts.values()), dtype=np.int64))


@st.composite
def requests(draw: st.DrawFn, vocabulary: int) -> tuple[dict[str, Any], list[int], list[int]]:
    """What is asked for, and what was before: the arguments of `changed`, a prompt, outputs."""
    token = st.integers(0, vocabulary - 1)
    asked = {
        "repetition": draw(st.sampled_from([1.0, 1.0, 1.3, 0.5, 2.0])),
        "presence": draw(st.sampled_from([0.0, 0.0, 0.5, -2.0, 2.0])),
        "frequency": draw(st.sampled_from([0.0, 0.0, 0.25, -2.0, 2.0])),
        "bias": draw(st.dictionaries(token, st.sampled_from([0.5, -1.25, 100.0, -100.0]), max_size=6)),
        "min_tokens": draw(st.integers(0, 6)),
        "unwanted": draw(st.lists(token, max_size=vocabulary - 1, unique=True)),
    }
    return asked, draw(st.lists(token, min_size=1, max_size=12)), draw(st.lists(token, max_size=12))


def changes_of(asked: dict[str, Any]) -> Changes | None:
    """Return the same as the executor reads it, by way of its message."""
    return read_changes(
        wire.SamplingParams(
            repetition_penalty=asked["repetition"],
            presence_penalty=asked["presence"],
            frequency_penalty=asked["frequency"],
            logit_bias=asked["bias"],
            min_tokens=asked["min_tokens"],
            unwanted_ids=asked["unwanted"],
        ),
        10_000,
    )


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(2, 40), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_logits_are_changed_as_plain_python_does_it_and_put_back(
    data: st.DataObject, vocabulary: int, count: int, seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 4, (count, vocabulary)).astype(np.float32))
    before, rows, expected = logits.clone(), [], logits.double().tolist()
    for row in range(count):
        asked, prompt, outputs = data.draw(requests(vocabulary))
        changes = changes_of(asked)
        if changes is None:
            continue
        # As a slot has it: some outputs were there when it opened, the others were counted one by one.
        history = None
        if changes.counts_tokens:
            history = history_of(prompt, outputs[:5], counts_prompt=asked["repetition"] != 1)
            for token in outputs[5:]:
                history.add(token)
        rows.append(Row(row, changes, len(outputs), history))
        expected[row] = changed(expected[row], prompt, outputs, **asked)
    made = change(logits, rows)
    np.testing.assert_allclose(logits.numpy(), np.array(expected), rtol=1e-5, atol=1e-4)
    made.undo()
    assert torch.equal(logits, before)


def slow_token(logits: list[float], draw: Draw, prompt: list[int], outputs: list[int], asked: dict[str, Any]) -> int | None:
    """Return the token that is to come; None where rounding decides."""
    row = np.array(changed(logits, prompt, outputs, **asked))
    if draw.sampling.temperature > 0:
        if kept(row, draw)[1] < 1e-4:
            return None
        row = sums(row, draw)
    second, first = np.sort(row)[-2:]
    return None if first - second < 1e-3 * max(1.0, abs(first)) else int(row.argmax())


@settings(deadline=None, max_examples=100)
@given(data=st.data(), vocabulary=st.integers(2, 60), count=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_every_field_of_sampling_at_once(
    draw_rows: DrawRows, data: st.DataObject, vocabulary: int, count: int, seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (count, vocabulary)).astype(np.float32))
    before = logits.clone()
    draws, expected = [], []
    for row in range(count):
        asked, prompt, outputs = data.draw(requests(vocabulary))
        changes = changes_of(asked)
        history = None
        if changes is not None and changes.counts_tokens:
            history = history_of(prompt, outputs, counts_prompt=changes.repetition != 1)
        how = sampling(
            changes,
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.05])),
            top_k=data.draw(st.sampled_from([0, 1, 3, 20, 100])),
            min_p=data.draw(st.sampled_from([0.0, 0.05, 0.5])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            with_logprobs=True,
        )
        draws.append(Draw(how, data.draw(st.integers(0, 63)), len(outputs), 0, history))
        expected.append(slow_token(before[row].tolist(), draws[-1], prompt, outputs, asked))
    found = sample(logits, draws, torch_peaks, draw_rows)
    assert not found.failed
    assert torch.equal(logits, before)
    for token, one in zip(found.token_ids, expected, strict=True):
        assert one is None or token == one
    for row, told in found.logprobs.items():  # the model's own, whatever was changed
        assert told.logprob == pytest.approx(float(before[row].double().log_softmax(-1)[found.token_ids[row]]), abs=1e-5)


def test_a_row_of_nan_fails_alone_and_the_others_count_on(draw_rows: DrawRows) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = math.nan
    changes = Changes(repetition=2.0, presence=1.0, bias_ids=np.array([3]), bias=np.array([50.0], dtype=np.float32))
    draws = [Draw(sampling(changes), 0, 0, 0, history_of([1, 5], [2], counts_prompt=True)) for _ in range(3)]
    found = sample(logits, draws, torch_peaks, draw_rows)
    assert (found.failed, found.token_ids) == ([1], [3, 0, 3])


@pytest.mark.parametrize("penalty", [1e-38, 3e38])
def test_a_penalty_beyond_all_measure_leaves_numbers(penalty: float) -> None:
    logits = torch.tensor([[2.0, -3.0, 0.0, -math.inf]])
    changes = Changes(repetition=penalty, presence=2.0, frequency=2.0)
    made = change(logits, [Row(0, changes, 0, history_of([0, 1, 2, 3], [1], counts_prompt=True))])
    assert not logits.isnan().any()
    assert torch.isfinite(logits[0, :3]).all()
    assert logits[0, 3] == -math.inf
    made.undo()
    assert logits.tolist() == [[2.0, -3.0, 0.0, -math.inf]]


def test_choices_of_a_beam_are_the_model_s_own_but_for_ends_that_come_too_early() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    changes = Changes(min_tokens=2, unwanted_ids=np.array([0]))
    own = logits[0].log_softmax(-1).tolist()
    early, late = (sample(logits, [Draw(sampling(changes), 0, position, 3)]).choices[0] for position in (1, 2))
    assert [token for token, _ in early] == [1, 2, 3]
    assert [logprob for _, logprob in early] == pytest.approx(own[1:])
    assert [token for token, _ in late] == [0, 1, 2]


@given(st.lists(st.integers(0, 300), max_size=300), st.lists(st.integers(0, 300), max_size=300))
def test_a_history_counts_what_comes(prompt: list[int], outputs: list[int]) -> None:
    history = history_of(prompt, outputs[:100], counts_prompt=True)
    for token in outputs[100:]:
        history.add(token)
    counts = Counter(outputs)
    found = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert len(found) == len(history.ids)
    assert found == {token: counts[token] for token in {*prompt, *outputs}}


def test_a_history_is_read_as_it_was_sent() -> None:
    history = read_history(wire.History(prompt_seen=b"\x05\x80", output_gaps=[2, 1, 13], output_counts=[4, 1, 300]), 17)
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {0: 0, 15: 0, 2: 4, 3: 1, 16: 300}
    assert len(read_history(wire.History(), 1).ids) == 0


@pytest.mark.parametrize(
    "message",
    [
        wire.History(prompt_seen=b"\x00\x00\x02"),
        wire.History(output_gaps=[17], output_counts=[1]),
        wire.History(output_gaps=[3, 0], output_counts=[1, 1]),
        wire.History(output_gaps=[3, 1], output_counts=[1]),
        wire.History(output_gaps=[3], output_counts=[0]),
    ],
)
def test_a_history_that_can_not_be_is_refused(message: wire.History) -> None:
    with pytest.raises(PlanError):
        read_history(message, 17)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"logit_bias": {17: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"unwanted_ids": [17], "min_tokens": 1},
        {"unwanted_ids": [1] * 129, "min_tokens": 1},
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        read_changes(wire.SamplingParams(**params), 17)


def test_what_changes_nothing_is_nothing() -> None:
    for params in ({}, {"repetition_penalty": 1.0}, {"min_tokens": 5}, {"unwanted_ids": [3]}):
        assert read_changes(wire.SamplingParams(**params), 17) is None


# ------------------------------------------------------------------------------------------------------- the native draw


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("vocabulary", [5003, 49_152])
def test_wide_rows_are_drawn_as_torch_draws_them(draw_rows: DrawRows, vocabulary: int, spread: float) -> None:
    logits = torch.randn(10, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
    logits[5:] = (logits[5:] * 4).round() / 4  # they tie
    filters: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 5.0},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 3000, "top_p": 0.99, "temperature": 3.0},
        {"top_k": 2000},
        {"min_p": 0.01},
        {"top_p": 0.3, "temperature": 1e6},
        {"temperature": 1e-30},
        {"top_k": 1, "temperature": 3e38},
    ]
    for which in range(len(filters)):
        draws = [Draw(sampling(None, **{"seed": row, **filters[(row + which) % 10]}), row, which) for row in range(10)]
        assert sample(logits, draws, torch_peaks, draw_rows).token_ids == sample(logits, draws).token_ids


@pytest.mark.parametrize("tied", [1, 17, 5000])
def test_what_ties_with_the_last_one_kept_is_kept(draw_rows: DrawRows, tied: int) -> None:
    """Each of the tied ones can come, and nothing that is less likely."""
    logits = torch.full((1, 6000), -1.0)
    logits[0, 100 : 100 + tied] = 0.0
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.5}):
        draws = [Draw(sampling(None, **{"seed": 4, **filters}), 0, position) for position in range(40)]
        found = set(sample(logits.expand(40, -1), draws, torch_peaks, draw_rows).token_ids)
        assert found <= set(range(100, 100 + tied))
        assert len(found) > min(tied, 40) // 2


def test_a_row_is_drawn_the_same_alone_and_among_64(draw_rows: DrawRows) -> None:
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(3)) * 3
    draws = [Draw(sampling(None, top_p=[0.9, 1.0][row % 2], seed=row), 0, row) for row in range(64)]
    together = sample(logits, draws, torch_peaks, draw_rows).token_ids
    for row in range(64):
        assert sample(logits[row : row + 1], draws[row : row + 1], torch_peaks, draw_rows).token_ids == [together[row]]
