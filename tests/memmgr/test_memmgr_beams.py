"""Beam search through scheduler and memory: every beam gets the tokens and the score that the search has by itself."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from memmgr.core.quotas import Quota
from memmgr.schedule.beams import BeamSearch, Choice, Move
from memmgr.schedule.plans import EndCode, FinishReason
from tests.memmgr.memmgr_world import START, World, choose, mix


def offer(*pairs: tuple[int, float]) -> tuple[Choice, ...]:
    return tuple(Choice(token, logprob) for token, logprob in pairs)


def test_the_first_step_spreads_one_beam_over_all_lanes() -> None:
    search = BeamSearch(3, 1.0, frozenset({9}), 10)
    assert search.running == [0]
    assert search.choices == 4
    moves = search.advance({0: offer((5, -0.5), (6, -1.0), (7, -1.5), (8, -2.0))})
    assert moves == [Move(0, 0, 5), Move(1, 0, 6), Move(2, 0, 7)]
    assert search.running == [0, 1, 2]


def test_a_beam_with_children_keeps_its_lane_and_the_others_take_those_of_the_dead() -> None:
    search = BeamSearch(3, 1.0, frozenset(), 10)
    search.advance({0: offer((5, -0.5), (6, -1.0), (7, -1.5))})
    moves = search.advance({0: offer((1, -9.0)), 1: offer((1, -8.0)), 2: offer((1, -0.1), (2, -0.2), (3, -0.3))})
    assert moves == [Move(2, 2, 1), Move(0, 2, 2), Move(1, 2, 3)]
    assert search.tokens(0).tolist() == [7, 2]
    search.check_invariants()


def test_an_end_among_the_best_is_done_and_one_behind_them_is_forgotten() -> None:
    search = BeamSearch(2, 1.0, frozenset({9}), 10)
    search.advance({0: offer((5, -0.5), (9, -1.0), (6, -2.0))})
    assert [(one.score, one.tokens, one.ended) for one in search.finished] == [(-1.0, (9,), True)]
    # The third best continuation ends, but only the best two may.
    search.advance({0: offer((1, -0.1), (2, -0.2), (9, -0.3)), 1: offer((1, -5.0), (2, -6.0), (9, -7.0))})
    assert len(search.finished) == 1


def test_the_length_penalty_decides_between_short_and_long() -> None:
    for penalty, best in (0.0, (9,)), (2.0, (5, 9)):
        search = BeamSearch(2, penalty, frozenset({9}), 2)
        search.advance({0: offer((5, -1.0), (9, -1.1), (6, -5.0))})
        search.advance({0: offer((9, -0.5), (1, -3.0), (2, -4.0)), 1: offer((9, -9.0), (1, -9.0), (2, -9.0))})
        assert search.finished[0].tokens == best


def test_it_is_over_when_no_beam_can_beat_what_is_done() -> None:
    search = BeamSearch(2, 1.0, frozenset({8, 9}), 100)
    moves = search.advance({0: offer((9, -0.1), (8, -0.2), (5, -4.0), (6, -5.0))})
    assert moves == []
    assert [one.score for one in search.finished] == [-0.1, -0.2]


def test_a_beam_without_numbers_dies_and_the_others_go_on() -> None:
    search = BeamSearch(2, 1.0, frozenset(), 10)
    search.advance({0: offer((5, -0.5), (6, -1.0))})
    assert search.advance({0: (), 1: offer((1, -1.0), (2, -2.0))}) == [Move(1, 1, 1), Move(0, 1, 2)]
    assert search.advance({0: (), 1: ()}) == []
    assert search.finished == []


def test_beams_are_the_ones_of_the_search_by_itself() -> None:
    for prompt in range(20, 26):
        world = World(blocks=64, vocabulary=30)
        key = world.submit([prompt, 2, 3, 4, 5, 6], max_tokens=9, beam_width=4, samples=4, stop=[1, 2])
        world.run()
        world.check_answer(key)
        world.check_idle()


def test_beams_share_all_but_their_latest_tokens() -> None:
    world = World(blocks=64, block_size=4, vocabulary=30, prefix_cache=False)
    key = world.submit(range(12, 22), max_tokens=12, beam_width=4, samples=1)
    fewest = 64.0
    while world.clients[key].end is None:
        if world.plan() is None:
            world.complete()
        tables = [table.blocks for table in world.memory.tables.values()]
        if len(tables) == 4:
            fewest = min(fewest, len({block for blocks in tables for block in blocks}) / sum(map(len, tables)))
        world.scheduler.check_invariants()
    world.check_answer(key)
    assert fewest <= 0.5


def test_beams_ride_in_every_second_plan_and_others_in_all() -> None:
    world = World(blocks=64, vocabulary=30)
    world.submit(range(12, 22), max_tokens=8, beam_width=3, samples=1)
    other = world.submit(range(30, 34), max_tokens=20)
    both = alone = 0
    while world.clients[other].end is None:
        plan = world.plan()
        if plan is None:
            world.complete()
        elif any(sample.choices for sample in plan.samples):
            both += 1
        else:
            alone += 1
    assert both <= 8
    assert alone >= 8


def test_a_stop_string_is_not_for_beams() -> None:
    world = World(vocabulary=30)
    key = world.submit(range(12, 22), max_tokens=4, beam_width=2)
    world.plan()
    world.complete()
    world.scheduler.finish(key, 0, 0, world.now)
    world.run()
    world.check_answer(key)


def test_wider_than_the_batch_or_the_pool_is_refused() -> None:
    world = World(blocks=4, block_size=4, max_running=3)
    for width in (4, 3):
        key = world.submit(range(8), beam_width=width)
        end = world.clients[key].end
        assert end is not None
        assert end.code is EndCode.NEVER_FITS


def test_a_search_that_is_stopped_gives_its_best_so_far() -> None:
    search = BeamSearch(2, 1.0, frozenset({9}), 10)
    search.advance({0: offer((5, -0.5), (9, -1.0), (6, -2.0))})
    search.stop()
    assert search.running == []
    assert [(one.tokens, one.score, one.ended) for one in search.finished] == [((5,), -0.5, False), ((9,), -1.0, True)]


@pytest.mark.parametrize("host_blocks", [0, 90])
def test_a_search_that_outgrows_a_lowered_limit_keeps_what_it_has(host_blocks: int) -> None:
    world = World(blocks=64, block_size=4, vocabulary=30, host_blocks=host_blocks)
    key = world.submit(range(12, 20), max_tokens=40, beam_width=3, samples=2)
    for _ in range(20):
        world.step()
    lengths = {sequence.outputs for sequence in world.scheduler.running[0].live}
    world.scheduler.set_quota(Quota("tenant", max_blocks=6), world.now)
    world.listen()
    client = world.clients[key]
    assert client.end is not None
    assert client.end.code is EndCode.OK
    assert {len(tokens) for tokens in client.outputs.values()} == lengths
    assert {end.reason for end in client.sequence_ends.values()} == {FinishReason.CONTEXT}
    world.run()
    world.check_idle()


def test_no_numbers_at_all_end_a_search_with_an_error() -> None:
    failing = next(token for token in range(1000) if not _first_choices(token))
    world = World(vocabulary=30)
    key = world.submit([failing], max_tokens=4, beam_width=2, samples=2)
    world.run()
    client = world.clients[key]
    assert [end.reason for end in client.sequence_ends.values()] == [FinishReason.ERROR] * 2
    world.check_idle()


def _first_choices(token: int) -> tuple[Choice, ...]:
    return choose(mix(START, token), 30, 4).choices


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_beams_samples_and_single_requests_disturb_nobody(data: st.DataObject) -> None:
    """In pools in which few fit together, and some are preempted, each request gets what it would get alone."""
    block_size = data.draw(st.integers(1, 5))
    running = data.draw(st.integers(4, 8))
    world = World(
        blocks=-(-60 // block_size) + data.draw(st.integers(0, 4)),
        block_size=block_size,
        max_running=running,
        max_step_tokens=running + data.draw(st.integers(0, 8)),
        vocabulary=14,
        prefix_cache=data.draw(st.booleans()),
        host_blocks=data.draw(st.sampled_from([0, 10, 200])),
    )
    keys = []
    for _ in range(data.draw(st.integers(1, 5))):
        width = data.draw(st.sampled_from([0, 0, 2, 3, 4]))
        keys.append(
            world.submit(
                [*[1, 2, 3, 4, 5, 6][: data.draw(st.integers(1, 6))], data.draw(st.integers(0, 13))],
                max_tokens=data.draw(st.integers(1, 8)),
                stop=range(data.draw(st.sampled_from([0, 1, 3]))),
                beam_width=width,
                samples=data.draw(st.integers(1, max(1, width))),
                length_penalty=data.draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])),
                priority=data.draw(st.integers(-1, 1)),
            )
        )
        for _ in range(data.draw(st.integers(0, 6))):
            if not data.draw(st.booleans()) or world.plan() is None:
                world.complete()
            world.scheduler.check_invariants()
    for _ in range(400):
        if world.plan() is None and not world.complete():
            break
        world.scheduler.check_invariants()
    for key in keys:
        end = world.clients[key].end
        assert end is not None
        if end.code is not EndCode.NEVER_FITS:
            world.check_answer(key)
    world.check_idle()
