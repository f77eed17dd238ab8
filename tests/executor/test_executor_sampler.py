"""The sampler against a slow independent one, against transformers' filters, and against probability itself."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import race, sampler
from executor.sampler import Draw, Sampling, sample
from tests.executor.sampler_oracle import kept, sums

Floats = npt.NDArray[np.float32]


def draw(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    index: int = 0,
    position: int = 0,
    top_logprobs: int | None = None,
    choices: int = 0,
) -> Draw:
    given = Sampling(temperature, top_p, top_k, min_p, seed, top_logprobs is not None, top_logprobs or 0)
    return Draw(given, index, position, choices)


def test_choices_are_the_most_likely_tokens_and_draw_nothing() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 1.0, 2.0, 3.0], [0.0, math.nan, 0.0, 0.0]])
    samples = sample(logits.clone(), [draw(choices=3), draw(temperature=0), draw(choices=2)])
    assert samples.token_ids == [0, 0, 0]
    assert samples.failed == [2]
    assert samples.logprobs == {}
    assert samples.choices.keys() == {0}
    expected = logits[0].log_softmax(dim=-1).tolist()
    assert [token for token, _ in samples.choices[0]] == [1, 3, 2]
    assert [logprob for _, logprob in samples.choices[0]] == pytest.approx([expected[1], expected[3], expected[2]])


draws = st.builds(
    draw,
    temperature=st.sampled_from([1e-45, 1e-30, 0.1, 0.7, 1.0, 2.5, 1e6, 3e38]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1)),
    index=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
)


@st.composite
def rows(draw_: st.DrawFn) -> Floats:
    """Logits, some of them coarse so that they tie, some of them -inf."""
    count, vocabulary = draw_(st.integers(1, 4)), draw_(st.integers(1, 90))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, draw_(st.sampled_from([0.1, 2, 8])), (count, vocabulary))
    if draw_(st.booleans()):
        logits = np.round(logits * 2) / 2
    if draw_(st.booleans()):
        logits[:, 1:][rng.random((count, vocabulary - 1)) < 0.3] = -math.inf
    return logits.astype(np.float32)


@settings(deadline=None, max_examples=150)
@given(rows(), st.lists(draws, min_size=4, max_size=4))
def test_every_token_is_the_slow_samplers(logits: Floats, each: list[Draw]) -> None:
    each = each[: len(logits)]
    found = sample(torch.from_numpy(logits.copy()), each)
    assert found.failed == []
    for row, one, token in zip(logits.astype(np.float64), each, found.token_ids, strict=True):
        keep, margin = kept(row, one)
        if margin < 1e-5:
            continue  # float32 may see the last token on the other side
        assert keep[token]
        best = sums(row, one)
        assert best[token] >= best.max() - 1e-5 * max(1.0, abs(best.max()))


@pytest.mark.parametrize("vocabulary", [5000, 5003])
@pytest.mark.parametrize(
    "one",
    [
        draw(),
        draw(temperature=3.0),
        draw(top_k=1024),
        draw(top_k=2000),
        draw(top_p=0.9),
        draw(top_p=0.9999, temperature=4.0),
        draw(top_k=1500, top_p=0.95, temperature=5.0),
        draw(min_p=1e-4),
        draw(top_k=3000, top_p=0.7, min_p=0.01),
    ],
)
def test_wide_vocabularies(vocabulary: int, one: Draw) -> None:
    """Past the width that top-k looks at first, and past the tokens that the draw looks at first."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 4, (3, vocabulary)).astype(np.float32)
    each = [Draw(one.sampling, index, 11) for index in range(3)]
    found = sample(torch.from_numpy(logits.copy()), each)
    for row, each_one, token in zip(logits.astype(np.float64), each, found.token_ids, strict=True):
        best = sums(row, each_one)
        assert best[token] >= best.max() - 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_ties_at_the_edge_of_the_first_width(seed: int) -> None:
    """More tokens tie with the k-th than the first look sees: they are all kept, and weighed by top-p."""
    logits = np.full((1, 4000), 1.0, dtype=np.float32)
    logits[0, :10] = 3.0
    one = draw(top_k=1000, top_p=0.04, seed=seed)  # the ten alone hold 2 % of all, and 7 % of what the first look sees
    keep, _ = kept(logits[0].astype(np.float64), one)
    assert keep.sum() == 4000
    token = sample(torch.from_numpy(logits.copy()), [one]).token_ids[0]
    assert token == int(sums(logits[0].astype(np.float64), one).argmax())


@pytest.mark.parametrize("vocabulary", [200, 3000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "temperature"),
    [
        (2000, 1.0, 0.0, 1.0),
        (1500, 0.99, 0.0, 3.0),
        (5, 1.0, 0.0, 1.0),
        (0, 0.8, 0.0, 0.7),
        (0, 1.0, 0.1, 1.5),
        (20, 0.9, 0.05, 2.0),
        (0, 0.01, 0.0, 1.0),
        (60, 0.97, 0.0, 1.3),
    ],
)
def test_the_filters_are_transformers(vocabulary: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    logits = torch.randn(20, vocabulary) * 3
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    tempered = (logits - logits.amax(-1, keepdim=True)) / temperature
    one = draw(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature).sampling
    assert torch.equal(tempered >= sampler.cutoffs(tempered, [one] * 20)[:, None], torch.isfinite(scores))


def test_the_distribution_is_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -3.0, 0.5, 0.5, -8.0])
    count = 20_000
    each = [draw(seed=5, position=position, temperature=1.3) for position in range(count)]
    found = torch.tensor(sample(logits.expand(count, -1).clone(), each).token_ids)
    expected = torch.softmax(logits / 1.3, -1).double() * count
    observed = torch.bincount(found, minlength=9).double()
    # Chi-square with 8 degrees of freedom: beyond 26.1 once in a thousand.
    assert float(((observed - expected) ** 2 / expected).sum()) < 26.1


@pytest.mark.parametrize("changed", ["seed", "index", "position", "high"])
def test_every_counter_matters(changed: str) -> None:
    """Two draws that differ in one number only are independent: they agree about as often as chance has it."""
    count = 400
    one = [draw(seed=9, position=position) for position in range(count)]
    other = {
        "seed": [draw(seed=10, position=position) for position in range(count)],
        "high": [draw(seed=9 + 2**32, position=position) for position in range(count)],
        "index": [draw(seed=9, index=1, position=position) for position in range(count)],
        "position": [draw(seed=9, position=position + count) for position in range(count)],
    }[changed]
    flat = torch.zeros(count, 50)
    same = np.equal(sample(flat.clone(), one).token_ids, sample(flat.clone(), other).token_ids).sum()
    assert same < 30  # 8 expected


def test_a_row_is_alone_in_any_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, 3001) * 4
    each = [
        draw(
            seed=row,
            position=row * 3,
            temperature=[0.0, 0.5, 1.0, 2.0][row % 4],
            top_k=[0, 0, 30, 2000][row % 4],
            top_p=[1.0, 0.9, 0.99][row % 3],
            min_p=[0.0, 0.01][row % 2],
            top_logprobs=[None, 3][row % 2],
        )
        for row in range(40)
    ]
    together = sample(logits.clone(), each)
    for row in range(40):
        alone = sample(logits[row : row + 1].clone(), each[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        if row in together.logprobs:
            assert alone.logprobs[0].rank == together.logprobs[row].rank
            assert [token for token, _ in alone.logprobs[0].top] == [token for token, _ in together.logprobs[row].top]


def test_noise_in_the_logits_changes_no_token() -> None:
    """As another batch size brings it."""
    torch.manual_seed(3)
    logits = torch.randn(200, 2000) * 3
    each = [draw(seed=row, position=row) for row in range(200)]
    noisy = logits + (torch.rand_like(logits) - 0.5) * 2e-5
    assert sum(a != b for a, b in zip(sample(logits.clone(), each).token_ids, sample(noisy, each).token_ids, strict=True)) <= 1


def test_rows_are_drawn_whole_or_in_part_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    logits = torch.randn(12, 1500) * 2
    each = [draw(seed=row, position=row, top_p=[1.0, 0.9][row % 2]) for row in range(12)]
    found = []
    for share, tile, passes in ((2.0, 64 * 1024, 4_000_000), (0.0, 1000, 4_000_000), (0.25, 100, 3000), (2.0, 37, 1)):
        monkeypatch.setattr(race, "_WHOLE_SHARE", share)
        monkeypatch.setattr(race, "_TILE", tile)
        monkeypatch.setattr(sampler, "_MAX_LOGITS", passes)
        found.append(sample(logits.clone(), each).token_ids)
    assert found[1:] == found[:-1]


@pytest.mark.parametrize("near", [0.0, 1.0, 30.0])
def test_where_the_race_begins_does_not_matter(near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    logits = torch.randn(400, 97) * 2
    each = [draw(seed=row) for row in range(400)]
    expected = sample(logits.clone(), each).token_ids
    monkeypatch.setattr(race, "_NEAR", near)
    assert sample(logits.clone(), each).token_ids == expected


def test_greedy_takes_the_lowest_of_equals_and_ignores_the_filters() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    each = [draw(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5), draw(temperature=0.0)]
    assert sample(logits, each).token_ids == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_a_row_that_is_no_numbers_fails_alone(temperature: float, bad: float | str) -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, 60)
    each = [draw(temperature=temperature, seed=row, top_p=0.9, top_logprobs=2) for row in range(3)]
    healthy = sample(logits.clone(), each)
    if isinstance(bad, str):
        logits[1] = -math.inf
    else:
        logits[1, 7] = bad
    found = sample(logits, each)
    assert found.failed == [1]
    assert found.token_ids[1] == 0
    assert (found.token_ids[0], found.token_ids[2]) == (healthy.token_ids[0], healthy.token_ids[2])
    assert found.logprobs.keys() == {0, 2}


def test_half_precision_logits_are_sampled_in_float32() -> None:
    torch.manual_seed(6)
    logits = (torch.randn(8, 300) * 3).bfloat16()
    each = [draw(seed=row) for row in range(8)]
    assert sample(logits, each).token_ids == sample(logits.float(), each).token_ids


def test_no_draws() -> None:
    assert sample(torch.zeros(0, 10), []).token_ids == []


# ---------------------------------------------------------------------------------------------------- log-probabilities


@settings(deadline=None, max_examples=80)
@given(rows(), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_log_probabilities(logits: Floats, asked: int, seed: int) -> None:
    each = [draw(seed=seed, temperature=[0.0, 1.7][row % 2], top_k=3, top_logprobs=asked) for row in range(len(logits))]
    found = sample(torch.from_numpy(logits.copy()), each)
    for number, row in enumerate(logits.astype(np.float64)):
        with np.errstate(divide="ignore"):
            expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        one = found.logprobs[number]
        assert one.token_id == found.token_ids[number]
        assert one.logprob == pytest.approx(expected[one.token_id], abs=1e-4)
        assert one.rank == 1 + (row > row[one.token_id]).sum()
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:asked]
        assert [token for token, _ in one.top] == order
        assert [value for _, value in one.top] == pytest.approx([expected[token] for token in order], abs=1e-4)
