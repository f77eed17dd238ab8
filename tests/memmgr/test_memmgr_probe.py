"""A dry run beside the run: what a probe tells is what becomes of a request of that tenant, in worlds with quotas."""

from __future__ import annotations

import os
from array import array

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from memmgr.core.quotas import Quota
from memmgr.schedule.plans import EndCode
from memmgr.schedule.probe import probe
from memmgr.schedule.requests import State
from tests.memmgr.memmgr_world import World
from tests.memmgr.test_memmgr_quotas_machine import FLOORED, NOISY, PLAIN, QUOTAS, TURNS, WISHES, Play, Wish, worlds

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "300"))

ASKED = st.builds(
    Wish,
    tenant=st.sampled_from([NOISY, FLOORED, PLAIN]),
    base_length=st.sampled_from([12, 9, 6, 3, 0]),
    more=st.sampled_from([1, 2, 5, 21, 93, 400, 9000]),
    max_tokens=st.sampled_from([0, 1, 4, 9, 60]),
    priority=st.just(0),
    samples=st.sampled_from([1, 1, 2, 3, 7]),
    beam_width=st.just(0),
    cancelled_after=st.just(0),
)


def alone_in_the_queue(world: World) -> None:
    """Let nothing be in flight, nobody wait, and no prompt be under way: a request that comes now is the next to be looked at."""
    scheduler = world.scheduler
    while True:
        while world.complete():
            pass
        for request in scheduler.waiting:
            scheduler.cancel(request.submission.key, EndCode.CANCELLED, "for the others", world.now)
        world.listen()
        if all(sequence.decoding for request in scheduler.running for sequence in request.live) and not scheduler.waiting:
            return
        world.plan()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.lists(WISHES, max_size=6), st.lists(QUOTAS, max_size=6), TURNS, ASKED)
def test_a_probe_tells_what_becomes_of_a_request(
    world: World, wishes: list[Wish], quotas: list[tuple[str, int, int, int]], turns: list[str], asked: Wish
) -> None:
    game = Play(world, wishes, quotas)
    for turn in turns:
        game.take(turn)
    alone_in_the_queue(world)
    scheduler, prompt = world.scheduler, array("I", asked.prompt)
    told = probe(scheduler, asked.tenant, "", prompt, asked.max_tokens, asked.samples)
    assert told.waiting_ahead == 0
    key = world.submit(prompt, asked.max_tokens, samples=asked.samples, tenant=asked.tenant)
    end = world.clients[key].end
    assert told.fits_ever == (end is None), end
    if end is not None:
        assert end.code is EndCode.NEVER_FITS
        assert not told.fits_now
        return
    request = scheduler.find(asked.tenant, f"request-{key[1]}")
    assert request is not None
    assert told.worst_case_blocks == request.most_blocks
    limit = world.memory.quotas.limit(asked.tenant)
    assert limit is None or told.worst_case_blocks <= limit
    names = {block: world.memory.index.hash_of(block) for block in told.evicted_blocks}
    counters = world.memory.counters
    before = counters.allocated_blocks, scheduler.counters.preemptions
    searches = [one for one in scheduler.running if one.search is not None]
    plan = world.plan()
    if plan is not None and sum(chunk.count for chunk in plan.chunks) >= world.limits.max_step_tokens:
        return  # the budget of the step may have been what kept it out
    if any(one.state is State.ENDED for one in searches):
        return  # a search makes its step with the plan: what it had is free since
    began = request in scheduler.running
    if not began and before != (counters.allocated_blocks, scheduler.counters.preemptions):
        return  # those who run took blocks for themselves first
    assert told.fits_now == began
    assert not any(world.memory.index.hash_of(block) == name for block, name in names.items())


def test_a_quota_bounds_what_a_probe_tells() -> None:
    world = World(blocks=64, block_size=4, context_length=128)
    world.scheduler.set_quota(Quota("small", max_blocks=6), 0.0)

    def most(tenant: str, sequences: int) -> tuple[bool, int]:
        told = probe(world.scheduler, tenant, "", array("I", range(8)), 0, sequences)
        return told.fits_ever, told.worst_case_blocks

    assert most("large", 1) == (True, 32)
    assert most("large", 4) == (True, 2 + 4 * 15), "what four can hold together of 64"
    assert most("small", 1) == (True, 6)
    assert most("small", 3) == (True, 2 + 3 * 1)
    assert most("small", 5) == (False, 2 + 5 * 30), "with all that it asks for"
