"""Quotas in the scheduler: who waits, who is preempted, what is kept back; and the counts below, at their edges."""

from __future__ import annotations

import pytest

from memmgr.core.quotas import Quota, Quotas
from memmgr.schedule.plans import EndCode, FinishReason, RequestEnd, RequestKey
from memmgr.schedule.requests import Request
from memmgr.schedule.tenants import Tenants
from tests.memmgr.memmgr_world import World


def running(world: World) -> list[RequestKey]:
    return [request.submission.key for request in world.scheduler.running]


def codes(world: World) -> list[EndCode | None]:
    return [None if client.end is None else client.end.code for client in world.clients.values()]


def end_of(world: World, key: RequestKey) -> RequestEnd:
    end = world.clients[key].end
    assert end is not None
    return end


def limit(world: World, tenant: str, blocks: int = 0, floor: int = 0, most_running: int = 0) -> None:
    world.scheduler.set_quota(Quota(tenant, blocks, floor, most_running), world.now)
    world.listen()


def test_what_is_owed_follows_floors_and_use() -> None:
    quotas = Quotas(8)
    assert not quotas
    assert quotas.room("a", 5) == 5
    for block in range(3):
        quotas.charge(block, "a")
    quotas.set(Quota("a", max_blocks=4, guaranteed_blocks=4))
    quotas.set(Quota("b", guaranteed_blocks=2))
    assert (quotas.guaranteed, quotas.owed) == (6, 3)
    assert quotas.room("a", 5) == 1  # its limit
    assert quotas.room("b", 5) == 4
    assert quotas.room("c", 5) == 2
    assert quotas.room("c", 1) == -2
    assert quotas.deficit(1) == 2
    assert quotas.kept_back("c", {"b": 1, "c": 2}) == 5  # b's promise is part of its floor
    assert quotas.kept_back("c", {"b": 7}) == 8
    quotas.charge_like(3, 0)
    with pytest.raises(AssertionError, match="beyond its limit"):
        quotas.charge(4, "a")
    quotas.discharge(3)
    quotas.set(Quota("a", max_blocks=2))
    assert quotas.allowance("a") == -1
    assert (quotas.guaranteed, quotas.owed) == (2, 2)
    quotas.set(Quota("b"))
    assert [quota.tenant for quota in quotas] == ["a"]
    for block in range(3):
        assert quotas.tenant(block) == "a"
        quotas.discharge(block)
    assert quotas.used("a") == 0
    assert quotas.check_invariants(iter(())) > 0


def test_a_tenant_at_its_limit_is_passed_by_others_and_not_by_its_own() -> None:
    world = World(blocks=32, block_size=4)
    limit(world, "noisy", 4)
    noisy = [world.submit([number] * 6, 2, tenant="noisy") for number in (1, 2, 3)]
    small = world.submit([4], 2, tenant="noisy")  # it would fit, and was the last to come
    quiet = [world.submit([number] * 6, 2, tenant="quiet") for number in (6, 7)]
    world.plan()
    assert running(world) == [*noisy[:2], *quiet][:3]
    world.run()
    for key in (*noisy, small, *quiet):
        world.check_answer(key)
    world.check_idle()


def test_of_a_thousand_that_wait_behind_their_limit_one_is_looked_at_where_its_tenant_holds_less() -> None:
    world = World(blocks=64, block_size=4, max_running=4, max_waiting=2000, context_length=100, max_step_tokens=64)
    limit(world, "noisy", most_running=1)
    for number in range(1000):
        world.submit([number // 25, number % 25, *[1] * 7], 40, tenant="noisy")
    quiet = world.submit([41] * 9, 3, tenant="quiet")
    world.step()
    assert len(world.scheduler.running) == 2
    held: list[Request] = []
    hold = Tenants.hold

    def noting(tenants: Tenants, request: Request, *, refused: bool) -> None:
        held.append(request)
        hold(tenants, request, refused=refused)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tenants, "hold", noting)
        for _ in range(12):
            world.step()
    assert len(held) == 3  # each time that the running one had taken a block
    assert len(set(held)) == 1
    world.check_answer(quiet)
    world.scheduler.check_invariants()


def test_at_its_limit_a_tenant_preempts_its_own_youngest_of_the_lowest_priority() -> None:
    world = World(blocks=64, block_size=4, context_length=64)
    limit(world, "noisy", 8)
    keys = [world.submit([number] * 7, 8, tenant="noisy", priority=priority) for number, priority in ((1, 1), (2, 0), (3, 0))]
    quiet = world.submit([4] * 7, 8, tenant="quiet", priority=5)  # of lower rank than all of them
    world.run()
    assert [end_of(world, key).preemptions > 0 for key in (*keys, quiet)] == [True, False, False, False]
    for key in (*keys, quiet):
        world.check_answer(key)
    world.check_idle()


def test_a_limit_lowered_below_the_use_takes_at_the_next_growth() -> None:
    world = World(blocks=64, block_size=4, context_length=64)
    first = world.submit([1] * 6, 6, tenant="noisy")
    second = world.submit([2] * 6, 6, tenant="noisy")
    world.step()
    limit(world, "noisy", 3)
    assert running(world) == [first, second]  # they fill the blocks that they have
    while (used := world.memory.quotas.used("noisy")) == 4:
        world.step()
    assert used == 3
    assert running(world) == [first]
    world.run()
    for key in (first, second):
        world.check_answer(key)
    world.check_idle()


def test_what_outgrew_a_lowered_limit_ends() -> None:
    world = World(blocks=64, block_size=4, context_length=64)
    grown, several = world.submit([1] * 6, 40, tenant="noisy"), world.submit([2] * 30, 9, tenant="noisy", samples=2)
    fits = world.submit([3] * 3, 2, tenant="noisy")
    other = world.submit([4] * 6, 40, tenant="quiet")
    for _ in range(8):
        world.step()
    limit(world, "noisy", 2)
    assert codes(world) == [EndCode.OK, EndCode.OK, EndCode.OK, None]  # `fits` was done before
    assert all(end.reason is FinishReason.CONTEXT for end in world.clients[several].sequence_ends.values())
    end = world.clients[grown].sequence_end
    assert end is not None
    assert end.reason is FinishReason.CONTEXT
    assert world.clients[grown].tokens == world.expected(grown)[0][: end.output_tokens]
    world.run()
    world.check_answer(fits)
    world.check_answer(other)


def test_a_request_without_an_output_that_can_never_fit_any_more_is_told_so() -> None:
    world = World(blocks=64, block_size=4, context_length=64)
    limit(world, "noisy", most_running=1)
    first, second = world.submit([1] * 6, 9, tenant="noisy"), world.submit([2] * 20, 4, tenant="noisy")
    world.step()
    limit(world, "noisy", 4)
    assert codes(world) == [None, EndCode.NEVER_FITS]
    assert "do not fit the 4 blocks that its tenant may have" in end_of(world, second).message
    world.run()
    world.check_answer(first)


def test_a_longest_prompt_of_a_limited_tenant_is_refused_and_a_long_answer_ends_with_the_limit() -> None:
    world = World(blocks=64, block_size=4, context_length=64)
    limit(world, "noisy", 3)
    refused, long = world.submit([1] * 12, 1, tenant="noisy"), world.submit([2] * 5, 40, tenant="noisy")
    several = world.submit([3] * 5, 1, tenant="noisy", samples=4)
    world.run()
    assert codes(world) == [EndCode.NEVER_FITS, EndCode.OK, EndCode.NEVER_FITS]
    end = world.clients[long].sequence_end
    assert end is not None
    assert (end.output_tokens, end.reason) == (7, FinishReason.CONTEXT)
    assert world.clients[refused].tokens == world.clients[several].tokens == []


def test_as_many_run_as_a_tenant_may() -> None:
    world = World(blocks=64, block_size=4, max_running=8)
    limit(world, "noisy", most_running=2)
    keys = [world.submit([number] * 3, 3, tenant="noisy") for number in range(5)]
    pair, triple = world.submit([7], 3, tenant="noisy", samples=2), world.submit([8], 3, tenant="noisy", samples=3)
    quiet = world.submit([9], 3, tenant="quiet")
    world.plan()
    assert running(world) == [*keys[:2], quiet]
    world.run()
    assert end_of(world, triple).code is EndCode.NEVER_FITS
    for key in (*keys, pair, quiet):
        world.check_answer(key)


def test_what_is_guaranteed_is_kept_back_and_passes_a_queue_that_is_stuck() -> None:
    world = World(blocks=16, block_size=4, context_length=40)
    limit(world, "floored", floor=4)
    big = [world.submit([number] * 20, 20, tenant="greedy") for number in (1, 2, 3)]  # 6 blocks to begin with
    world.plan()
    world.plan()
    assert running(world) == big[:2]
    assert world.memory.pool.available >= 4
    floored = world.submit([4] * 12, 4, tenant="floored")
    world.complete()
    world.plan()
    assert floored in running(world)
    world.run()
    assert end_of(world, floored).preemptions == 0
    for key in (*big, floored):
        world.check_answer(key)
    world.check_idle()


def test_a_floor_set_while_others_have_its_blocks_is_made_available_by_the_next_plan() -> None:
    world = World(blocks=16, block_size=4, context_length=40)
    greedy = [world.submit([number] * 14, 20, tenant="greedy") for number in (1, 2, 3)]
    for _ in range(4):
        world.step()
    assert world.memory.pool.available < 6
    limit(world, "floored", floor=6)
    world.step()
    assert world.memory.pool.available >= 6
    assert running(world) == greedy[:2]
    world.run()
    for key in greedy:
        world.check_answer(key)


def test_who_has_no_more_than_its_floor_is_not_preempted_for_others() -> None:
    world = World(blocks=16, block_size=4, context_length=40)
    limit(world, "floored", floor=6)
    greedy = world.submit([1] * 8, 32, tenant="greedy")
    also = world.submit([2] * 8, 32, tenant="greedy")
    floored = world.submit([3] * 8, 16, tenant="floored")  # the last in rank
    world.run()
    preemptions = [end_of(world, key).preemptions for key in (greedy, also, floored)]
    assert preemptions[0] == preemptions[2] == 0
    assert preemptions[1] > 0
    for key in (greedy, also, floored):
        world.check_answer(key)


def test_a_noisy_neighbour_changes_no_output() -> None:
    alone, beside = (World(blocks=24, block_size=4, context_length=48) for _ in range(2))
    limit(beside, "noisy", 10)
    outputs = []
    for world, noise in (alone, 0), (beside, 12):
        for number in range(noise):
            world.submit([number] * 9, 20, tenant="noisy", priority=-1)
        keys = [world.submit([number] * 11, 12, tenant="quiet") for number in (20, 21, 22)]
        world.run(4000)
        outputs.append([world.clients[key].tokens for key in keys])
        world.check_idle()
    assert outputs[0] == outputs[1]
