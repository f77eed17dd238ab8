"""Samples and beams in simulated memory: every block counted once, and what sharing saves against counts made another way."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from statistics import mean, stdev

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from memmgr.simulate import saturated
from memmgr.simulate.beams import Parents, parents_at, parse
from memmgr.simulate.policies import Policy
from memmgr.simulate.saturated import Setup, simulate
from memmgr.simulate.synthetic import ALPACA_OUTPUTS, ALPACA_PROMPTS, Lengths, alpaca
from memmgr.simulate.traces import TraceRequest


def setup(samples: int, num_blocks: int, block_size: int = 4, context_length: int = 40) -> Setup:
    return Setup(Policy.PAGED, num_blocks, block_size, context_length, 64, 256, samples=samples)


# -------------------------------------------------------------------------------------------------------- samples


def test_the_slots_of_two_samples_are_known_one_by_one() -> None:
    """Three blocks of four; prompts of 5, two samples of 3. One request runs, the other waits.

    Step 1: the prompt, 5 slots in blocks A B, both samples hold both. Steps 2 and 3: one sample clones B, so A, B, C hold
    4 + 2 + 2 and 4 + 3 + 3. Of B and C a sample will write 2 slots more after 5 tokens, 1 after 6, none after 7.
    """
    report = simulate(setup(2, num_blocks=3, context_length=8), [TraceRequest(5, 3), TraceRequest(5, 3)])
    assert (report.requests, report.steps, report.mean_running, report.max_waste_tokens) == (2, 6, 1.0, 3)
    assert report.utilization == pytest.approx((5 + 8 + 10) / 36)
    assert report.reserved == pytest.approx((2 + 2 * 1 + 0) / 36)
    assert report.internal_fragmentation == pytest.approx((1 + 2 + 2) / 36)
    assert report.free == pytest.approx(4 / 36), "a third block in the first step"
    assert report.shared_saving == pytest.approx(1 - (2 + 3 + 3) / (4 + 4 + 4))


@pytest.mark.parametrize("samples", [2, 3, 7])
def test_the_shares_sum_to_one_with_samples_too(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(run: saturated._Run) -> None:
        run._world.scheduler.check_invariants()
        original(run)

    original = saturated._Run._feed
    monkeypatch.setattr(saturated._Run, "_feed", feed)
    source = random.Random(samples)
    trace = [TraceRequest(source.randint(1, 20), source.randint(1, 20)) for _ in range(40)]
    report = simulate(setup(samples, num_blocks=70), trace)
    assert report.requests == 40
    shares = (report.utilization, report.reserved, report.internal_fragmentation, report.external_fragmentation, report.free)
    assert sum(shares) == pytest.approx(1)
    assert all(share >= 0 for share in shares)
    assert 0 < report.max_waste_tokens < 4
    assert 0 < report.shared_saving < 1 - 1 / samples
    assert report == simulate(setup(samples, num_blocks=70), trace), "the same trace, the same numbers"


def test_samples_share_the_whole_blocks_of_their_prompt() -> None:
    """Where nothing is short: floor(p / size) blocks of a request once, the rest for each sample; in its first step all once."""
    source = random.Random(1)
    trace = [TraceRequest(source.randint(1, 30), source.randint(1, 10)) for _ in range(30)]
    physical = logical = 0
    for request in trace:
        for length in range(request.prompt_tokens, request.prompt_tokens + request.output_tokens):
            blocks, whole = -(-length // 4), request.prompt_tokens // 4
            first = length == request.prompt_tokens
            logical += 5 * blocks
            physical += blocks if first else whole + 5 * (blocks - whole)
    report = simulate(setup(5, num_blocks=5000), trace)
    assert report.preemptions == 0
    assert report.shared_saving == pytest.approx(1 - physical / logical)


def test_one_sample_shares_nothing() -> None:
    assert simulate(setup(1, num_blocks=30), [TraceRequest(9, 9)] * 20).shared_saving == 0


def test_samples_that_never_fit_together_are_left_out() -> None:
    report = simulate(setup(4, num_blocks=8, context_length=32), [TraceRequest(30, 2), TraceRequest(4, 4)])
    assert (report.requests, report.refused) == (1, 1)


def test_what_is_reserved_ahead_is_shared_with_nobody() -> None:
    with pytest.raises(AssertionError):
        Setup(Policy.CONTIGUOUS_MAX, 10, 4, 40, 8, 8, samples=2)


# ---------------------------------------------------------------------------------------------------------- beams


def naive_saving(trace: Sequence[TraceRequest], searches: Sequence[Parents], size: int) -> float:
    """Two beams share a block where they were one until it was full; a last block, just written to, is one beam's alone."""
    physical = logical = 0
    for number, request in enumerate(trace):
        parents = searches[number % len(searches)]
        pasts: list[tuple[object, ...]] = [("prompt",) * request.prompt_tokens] * len(parents[0])
        for step in range(request.output_tokens):
            if step:
                chosen = parents_at(parents, step - 1)
                pasts = [(*pasts[parent], (step, beam)) for beam, parent in enumerate(chosen)]
            physical += len({past[:end] for past in pasts for end in (*range(size, len(past), size), len(past))})
            logical += sum(-(-len(past) // size) for past in pasts)
    return 1 - physical / logical


def test_two_beams_are_known_step_by_step() -> None:
    """Blocks of four, a prompt of 3. The beams part at once; then both go on from the second."""
    setup = Setup(Policy.PAGED, 20, 4, 40, 8, 64, searches=(((0, 0), (1, 1)),))
    report = simulate(setup, [TraceRequest(3, 3)])
    # the prompt, held by both; each its own block; the full block of the one, shared, and a new one for each
    assert report.shared_saving == pytest.approx(1 - (1 + 2 + 3) / (2 + 2 + 4))
    assert (report.requests, report.steps, report.max_waste_tokens) == (1, 3, 3)


@st.composite
def searches(draw: st.DrawFn) -> tuple[Parents, ...]:
    width = draw(st.integers(2, 4))
    steps = st.lists(st.tuples(*[st.integers(0, width - 1)] * width), min_size=1, max_size=12)
    return tuple(((0,) * width, *draw(steps)) for _ in range(draw(st.integers(1, 3))))


@settings(max_examples=60, deadline=None)
@given(
    searches=searches(),
    trace=st.lists(st.builds(TraceRequest, st.integers(1, 9), st.integers(1, 16)), min_size=1, max_size=6),
    size=st.integers(1, 5),
)
def test_blocks_are_as_many_as_there_are_different_pasts(
    searches: tuple[Parents, ...], trace: list[TraceRequest], size: int
) -> None:
    report = simulate(Setup(Policy.PAGED, 1000, size, 64, 64, 256, searches=searches), trace)
    assert (report.requests, report.preemptions) == (len(trace), 0)
    assert report.shared_saving == pytest.approx(naive_saving(trace, searches, size))
    assert report.max_waste_tokens < size


def test_beams_come_to_their_end_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(run: saturated._Run) -> None:
        run._world.scheduler.check_invariants()
        original(run)

    original = saturated._Run._feed
    monkeypatch.setattr(saturated._Run, "_feed", feed)
    source = random.Random(3)
    recording = ((0, 0, 0), *(tuple(source.randrange(3) for _ in range(3)) for _ in range(9)))
    trace = [TraceRequest(source.randint(1, 12), source.randint(1, 25)) for _ in range(25)]
    setup = Setup(Policy.PAGED, 30, 4, 40, 64, 256, searches=(recording,))
    report = simulate(setup, trace)
    assert report.requests == 25
    assert report.preemptions > 0
    shares = (report.utilization, report.reserved, report.internal_fragmentation, report.external_fragmentation, report.free)
    assert sum(shares) == pytest.approx(1)
    assert all(share >= 0 for share in shares)
    assert 0 < report.shared_saving < 2 / 3
    assert report == simulate(setup, trace), "the same trace, the same numbers"


def test_an_output_longer_than_its_recording_begins_it_again_after_the_first_step() -> None:
    parents: Parents = ((0, 0), (0, 1), (1, 1))
    assert [parents_at(parents, step) for step in range(6)] == [(0, 0), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1)]


def test_a_recording_is_read_and_a_wrong_one_is_a_bug() -> None:
    text = json.dumps({"widths": {"2": ["00 01 11"], "3": ["000 012"]}})
    assert parse(text) == {2: (((0, 0), (0, 1), (1, 1)),), 3: (((0, 0, 0), (0, 1, 2)),)}
    for wrong in ("00 02", "00 011", "01 01", "00"):
        with pytest.raises(AssertionError):
            parse(json.dumps({"widths": {"2": [wrong]}}))


# -------------------------------------------------------------------------------------------------------- lengths


def test_made_up_lengths_have_their_means_and_repeat() -> None:
    trace = list(alpaca(20_000, seed=5))
    assert trace == list(alpaca(20_000, seed=5))
    assert trace[:50] != list(alpaca(50, seed=6))
    for lengths, drawn in (
        (ALPACA_PROMPTS, [request.prompt_tokens for request in trace]),
        (ALPACA_OUTPUTS, [request.output_tokens for request in trace]),
    ):
        assert min(drawn) >= 1
        assert abs(mean(drawn) - lengths.mean) < 4 * stdev(drawn) / 20_000**0.5 + 0.1


def test_a_length_is_at_least_one_token() -> None:
    source = random.Random(0)
    assert {Lengths(0.01, 0.5).draw(source) for _ in range(100)} == {1}
