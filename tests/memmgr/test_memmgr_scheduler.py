"""The scheduler, in small exact examples."""

from __future__ import annotations

from array import array

import pytest

from memmgr.core.blocks import BlockState
from memmgr.core.memory import Memory
from memmgr.schedule.plans import (
    EndCode,
    FinishReason,
    Limits,
    NewToken,
    Plan,
    RequestEnd,
    Sampled,
    SequenceEnd,
    Submission,
)
from memmgr.schedule.requests import State
from tests.memmgr.memmgr_world import World


def rows(plan: Plan | None) -> list[tuple[int, int, int]]:
    """Return (slot, start, count) of a plan's chunks."""
    assert plan is not None
    return [(chunk.slot, chunk.start, chunk.count) for chunk in plan.chunks]


def answer_with(world: World, *tokens: int) -> None:
    """Take in the oldest plan's result with these tokens instead of the executor's."""
    plan = world.in_flight.popleft()
    world.scheduler.complete(plan.step, [Sampled(token) for token in tokens], world.now)
    world.listen()
    world.scheduler.check_invariants()


# ---------------------------------------------------------------------------------------------- the batch of a step


def test_a_prompt_goes_in_chunks_and_samples_with_its_last() -> None:
    world = World(block_size=4, max_step_tokens=8)
    world.submit(range(20), 2)
    first = world.plan()
    assert rows(first) == [(0, 0, 8)]
    assert first is not None
    assert (first.opens, first.samples) == (((0, "sampling of (1, 1)", 0),), ())
    assert first.chunks[0].tokens == array("I", range(8))
    assert first.chunks[0].new_blocks == (0, 1)
    second = world.plan()
    assert rows(second) == [(0, 8, 8)]
    assert second is not None
    assert second.opens == ()
    world.complete()
    third = world.plan()
    assert rows(third) == [(0, 16, 4)]
    assert third is not None
    assert [(row.chunk, row.slot, row.position) for row in third.samples] == [(0, 0, 0)]


def test_plan_n_plus_1_leaves_before_result_n() -> None:
    world = World()
    key = world.submit([1, 2, 3], 5)
    world.plan()
    following = world.plan()
    assert rows(following) == [(0, 3, 1)]
    assert following is not None
    assert following.chunks[0].tokens is None, "the token that this slot sampled last"
    assert [row.position for row in following.samples] == [1]
    world.complete()
    third = world.plan()
    assert rows(third) == [(0, 4, 1)]
    assert world.clients[key].tokens == world.expected(key)[0][:1]
    world.run()
    world.check_answer(key)
    world.check_idle()


def test_decodes_come_first_and_never_wait_for_a_prompt() -> None:
    world = World(blocks=200, max_step_tokens=8)
    stream = world.submit([7], 40)
    world.step()
    world.submit(range(100), 5, priority=-1)  # before it in rank
    for number in range(14):
        assert rows(world.step()) == [(0, 1 + number, 1), (1, 7 * number, 7)]
    assert len(world.clients[stream].tokens) == 15


def test_a_stream_moves_in_every_step_while_long_prompts_are_computed() -> None:
    world = World(blocks=700, block_size=16, max_step_tokens=256, context_length=1200, max_running=16)
    stream = world.submit([1, 2, 3], 100)
    world.step()
    for number in range(8):
        world.submit([number, *range(1023)], 1)
    steps = 0
    while any(not world.clients[1, 2 + number].tokens for number in range(8)):
        before = len(world.clients[stream].tokens)
        world.step()
        steps += 1
        assert len(world.clients[stream].tokens) == before + 1
    assert steps == 33  # 8 * 1024 tokens with 255 in each step


def test_the_budget_goes_to_running_prompts_before_waiting_ones() -> None:
    world = World(max_step_tokens=10)
    world.submit(range(14), 1)
    assert rows(world.step()) == [(0, 0, 10)]
    world.submit(range(20, 40), 1, priority=-5)
    assert rows(world.step()) == [(0, 10, 4), (1, 0, 6)]


def test_no_more_run_than_may() -> None:
    world = World(max_running=2)
    keys = [world.submit([number], 3) for number in range(4)]
    assert rows(world.step()) == [(0, 0, 1), (1, 0, 1)]
    assert (len(world.scheduler.running), len(world.scheduler.waiting)) == (2, 2)
    world.run()
    for key in keys:
        world.check_answer(key)
    world.check_idle()


def test_priority_then_arrival() -> None:
    world = World(max_running=1)
    for priority in (0, 1, -1, 0, -1):
        world.submit([1], 1, priority=priority)
    ended: list[int] = []
    for _ in range(5):
        world.step()
        ended += [key[1] for key, client in world.clients.items() if client.end is not None and key[1] not in ended]
    assert ended == [3, 5, 1, 4, 2]


def test_an_urgent_one_is_the_first_to_start_and_is_not_preempted_itself() -> None:
    world = World(blocks=12, block_size=2, max_running=2)
    long = [world.submit([number, 7, 8], 9, priority=5) for number in (1, 2)]
    world.step()
    medium = [world.submit([number], 4, priority=1) for number in (3, 4, 5)]
    urgent = world.submit([6], 2, priority=-1)
    started: list[tuple[int, int]] = []
    while world.step() is not None:
        running = [request.submission.key for request in world.scheduler.running]
        started += [key for key in running if key not in (*long, *started)]
    assert started == [urgent, *medium]
    for key in world.clients:
        world.check_answer(key)
    world.check_idle()


def test_a_big_one_that_waits_is_not_passed() -> None:
    world = World(blocks=4, block_size=4)
    world.submit(range(50, 59), 6)
    world.step()
    big, small = world.submit(range(20, 30), 1), world.submit([5], 1)
    world.step()
    assert [request.submission.key for request in world.scheduler.waiting] == [big, small]
    world.run()
    world.check_answer(big)
    world.check_answer(small)
    world.check_idle()


def test_admission_leaves_the_blocks_that_running_prompts_still_need() -> None:
    world = World(blocks=8, block_size=4, max_step_tokens=8)
    world.submit(range(20), 1)  # 6 blocks with the one after it, 2 of them in the first step
    world.submit(range(30, 38), 1)  # 3 blocks: 6 are free, 4 of them are owed
    world.step()
    assert len(world.scheduler.waiting) == 1
    world.submit([1, 2], 1, priority=-1)
    world.step()
    assert [request.submission.key for request in world.scheduler.running] == [(1, 1)]
    world.run()
    assert world.scheduler.counters.preemptions == 0


def test_admission_leaves_the_block_that_the_first_output_needs() -> None:
    world = World(blocks=7, block_size=4, max_step_tokens=32)
    first = world.submit(range(16), 5)  # fills 4 blocks, and owes one for its first output
    world.submit(range(30, 38), 3)  # needs 3 with the one after it: 3 are free, 2 are not the first one's
    world.step()
    assert [request.submission.key for request in world.scheduler.running] == [first]
    world.run()
    world.check_answer(first)
    assert world.scheduler.counters.preemptions == 0


def test_admission_counts_the_blocks_of_all_samples() -> None:
    world = World(blocks=8, block_size=4, max_step_tokens=32)
    first = world.submit(range(16), 4)
    world.step()
    world.step()
    assert world.memory.pool.free == 3
    second = world.submit(range(30, 36), 3, samples=3)  # 2 blocks for the prompt and its first output, one more for each other
    world.step()
    assert [request.submission.key for request in world.scheduler.running] == [first]
    world.run()
    for key in (first, second):
        world.check_answer(key)
    assert world.scheduler.counters.preemptions == 0


# ------------------------------------------------------------------------------------------------------ preemption


def crowded() -> World:
    """Two requests that fill a pool of 4 blocks of 2; the next token of the first one needs a fifth."""
    world = World(blocks=4, block_size=2, prefix_cache=False)
    world.submit([1, 2, 3], 5)
    world.submit([4, 5, 6], 5)
    world.step()
    world.step()
    assert world.memory.pool.free == 0
    return world


def test_the_last_in_rank_makes_room_and_waits_with_its_seniority() -> None:
    world = crowded()
    world.submit([7], 1)
    plan = world.step()
    assert rows(plan) == [(0, 4, 1)]
    assert plan is not None
    assert plan.closes == (1,)
    assert [request.submission.key for request in world.scheduler.waiting] == [(1, 2), (1, 3)], "it came before the third"
    assert world.scheduler.counters.preemptions == 1
    assert set(plan.memory.freed) == {2, 3}
    world.run()
    for key in world.clients:
        world.check_answer(key)
    end = world.clients[1, 2].end
    assert end is not None
    assert end.preemptions == world.scheduler.counters.preemptions >= 1
    assert world.scheduler.counters.recomputed_tokens > 0
    world.check_idle()


def test_the_lowest_priority_goes_before_the_youngest() -> None:
    world = World(blocks=6, block_size=2, prefix_cache=False)
    world.submit([1, 2, 3], 5, priority=1)
    world.submit([4, 5, 6], 5)
    world.submit([7, 8, 9], 5)
    world.step()
    world.step()
    world.step()
    assert [request.submission.key for request in world.scheduler.waiting] == [(1, 1)]
    assert [request.submission.key for request in world.scheduler.running] == [(1, 2), (1, 3)]


def test_who_is_preempted_does_not_come_back_before_its_last_token_has() -> None:
    world = World(blocks=4, block_size=2, prefix_cache=False, max_step_tokens=8)
    world.submit([1, 2, 3], 5)
    second = world.submit([4, 5, 6], 5)
    world.plan()
    world.plan()
    world.complete()
    preempting = world.plan()
    assert rows(preempting) == [(0, 4, 1)]
    request = world.scheduler.waiting[0]
    assert (request.submission.key, request.state, request.in_flight) == (second, State.WAITING, 1)
    world.scheduler.cancel((1, 1), EndCode.CANCELLED, "", 0.0)  # room enough now
    world.listen()
    assert len(world.clients[second].tokens) == 1
    world.complete()
    assert len(world.clients[second].tokens) == 2, "the result in flight applies to it where it is: in the queue"
    plan = world.plan()
    assert rows(plan) == [(0, 0, 5)]
    assert plan is not None
    assert plan.chunks[0].tokens == array("I", [4, 5, 6, *world.clients[second].tokens])
    assert [row.position for row in plan.samples] == [2]
    world.run()
    world.check_answer(second)


def test_a_preempted_one_finds_its_blocks_again_where_they_were_not_needed() -> None:
    world = World(blocks=6, block_size=2)
    world.submit(range(1, 6), 6)
    second = world.submit(range(11, 16), 6)
    for _ in range(4):
        world.step()
    assert world.scheduler.counters.preemptions == 1
    assert world.memory.pool.cached > 0
    world.run()
    world.check_answer(second)
    end = world.clients[second].end
    assert end is not None
    assert end.cached_tokens == 0, "of its first admission"
    world.check_idle()


def test_each_prompt_token_is_counted_once_whoever_computed_it() -> None:
    """A prompt that is set aside half computed, and found whole in the cache when it comes back."""
    world = World(blocks=14, block_size=2, max_running=3, max_step_tokens=4)
    for prompt in [1, 2], [3, 4]:
        world.submit(prompt, 11)
    for _ in range(6):
        world.step()
    late = world.submit(range(20, 31), 1, priority=1)  # two tokens in each step, until the others take its blocks
    for _ in range(4):
        world.step()
    assert (world.scheduler.waiting[0].submission.key, world.scheduler.waiting[0].trunk.high_water) == (late, 6)
    world.submit(
        range(20, 31), 1, priority=-1
    )  # finds four of its tokens and computes the others; the first waits for six of them
    for _ in range(10):
        world.step()
    counters = world.scheduler.counters
    assert counters.prefix_query_tokens == 2 + 2 + 11 + 11
    assert (counters.prefix_hit_tokens, counters.prefill_tokens) == (4 + 4, 2 + 2 + 7 + 7)
    world.check_idle()


def test_a_lone_one_is_never_preempted() -> None:
    world = World(blocks=4, block_size=2)
    key = world.submit([1, 2, 3], 0)
    world.run()
    world.check_answer(key)
    assert world.scheduler.counters.preemptions == 0


# ----------------------------------------------------------------------------------------------------------- ends


def test_length_context_and_eos() -> None:
    world = World(blocks=4, block_size=4, context_length=10)
    length, exactly, context, everything = (world.submit([1, 2, 3], most) for most in (4, 7, 8, 0))
    world.run()
    ends = [world.clients[key].sequence_end for key in (length, exactly, context, everything)]
    assert [(end.output_tokens, end.reason) for end in ends if end is not None] == [
        (4, FinishReason.LENGTH),
        (7, FinishReason.LENGTH),
        (7, FinishReason.CONTEXT),
        (7, FinishReason.CONTEXT),
    ]
    stop = world.expected(everything)[0][2]
    eos = world.submit([1, 2, 3], 0, stop=[stop])
    world.run()
    assert world.clients[eos].tokens[-1] == stop, "the token itself is part of the output"
    end = world.clients[eos].sequence_end
    assert end is not None
    assert end.reason is FinishReason.EOS
    world.check_answer(eos)
    world.check_idle()


def test_a_stop_token_is_noticed_one_step_late_and_what_was_computed_meanwhile_is_counted() -> None:
    world = World()
    world.submit([1, 2, 3], 10, stop=[9])
    world.plan()
    world.plan()
    answer_with(world, 9)
    assert world.clients[1, 1].end is not None
    assert world.scheduler.counters.discarded_tokens == 0
    closing = world.plan()
    assert closing is not None
    assert (closing.chunks, closing.samples, closing.closes) == ((), (), (0,))
    answer_with(world, 5)
    assert world.clients[1, 1].tokens == [9]
    assert world.scheduler.counters.discarded_tokens == 1
    answer_with(world)
    assert world.plan() is None


def test_no_step_is_wasted_where_the_end_is_known() -> None:
    world = World()
    world.submit([1, 2, 3], 1)
    assert rows(world.plan()) == [(0, 0, 3)]
    assert world.plan() is None
    world.run()
    assert world.scheduler.counters.discarded_tokens == 0


def test_logits_that_are_no_numbers_end_the_sequence() -> None:
    world = World()
    key = world.submit([1, 2, 3], 5)
    world.plan()
    answer_with(world, 7)
    plan = world.plan()
    assert plan is not None
    world.in_flight.popleft()
    world.scheduler.complete(plan.step, [Sampled(0, failed=True)], 0.0)
    world.listen()
    assert world.clients[key].tokens == [7]
    assert world.clients[key].sequence_end == SequenceEnd(key, 0, 1, FinishReason.ERROR)
    assert world.clients[key].end is not None
    world.scheduler.check_invariants()


def test_what_may_be_no_numbers_is_not_found_by_others() -> None:
    world = World(block_size=2, max_step_tokens=8)
    good = world.submit([1, 2, 3, 4, 8], 1)
    world.run()
    world.check_answer(good)
    world.submit([1, 2, 3, 4, 5, 6, 7], 5)
    world.plan()
    plan = world.in_flight.popleft()
    assert plan.chunks[0].start == 4
    world.scheduler.complete(plan.step, [Sampled(0, failed=True)], 0.0)
    world.listen()
    world.scheduler.check_invariants()
    assert world.memory.pool.cached == 0, "which of its blocks is to blame isn't known"
    again = world.submit([1, 2, 3, 4, 5, 6, 7], 5)
    assert rows(world.plan()) == [(0, 0, 7)]
    assert world.clients[again].end is None


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "preempted"])
def test_what_a_released_sequence_left_is_not_found_once_its_sample_turns_out_to_be_no_number(cancelled: bool) -> None:
    world = World(blocks=6, block_size=2, max_step_tokens=16)
    senior, junior = world.submit([20, 21, 22], 5), world.submit([1, 2, 3, 4, 5], 5)
    world.plan()
    answer_with(world, 7, 7)
    world.plan()
    if cancelled:
        world.scheduler.cancel(junior, EndCode.CANCELLED, "", 0.0)
    world.plan()  # the senior takes the last block, and there is none for the junior
    request = world.scheduler.find("tenant", "request-2")
    assert (request is None) if cancelled else (request is not None and request.preemptions == 1)
    assert world.memory.pool.cached == 3  # two full blocks and the tail
    plan = world.in_flight.popleft()
    world.scheduler.complete(plan.step, [Sampled(7), Sampled(0, failed=True)], 0.0)
    world.listen()
    world.scheduler.check_invariants()
    assert world.memory.pool.cached == 0
    assert world.clients[senior].tokens == [7, 7]


def test_a_trunk_that_ends_before_the_others_fork_leaves_the_prompt_to_another() -> None:
    """Its stop string is told of when its request has been set aside and is on its way back."""
    world = World(blocks=24, block_size=2, max_running=4, max_step_tokens=4, prefix_cache=False)
    key = world.submit(range(12, 22), 12, samples=3)
    while len(world.clients[key].outputs) < 3:
        world.step()
    request = world.scheduler.find("tenant", "request-1")
    assert request is not None
    urgent = world.submit([1, 2, 12], 24, priority=-1)
    for _ in range(100):
        if request.preemptions and not request.forked and request.state is State.RUNNING:
            break
        world.step()
    assert (request.preemptions, request.forked, request.state) == (1, False, State.RUNNING)
    world.scheduler.finish(key, 0, 1, 0.0)
    world.listen()
    world.scheduler.check_invariants()
    world.run()
    for index in 1, 2:
        assert world.clients[key].outputs[index] == world.expected(key, index)[0]
    assert world.clients[key].sequence_ends[0].reason is FinishReason.STOP
    world.check_answer(urgent)
    world.check_idle()


# ------------------------------------------------------------------------------ prefixes that are being computed


def test_requests_that_begin_alike_compute_it_once_and_hold_it_once() -> None:
    world = World(blocks=200, block_size=4, max_running=40, max_step_tokens=64)
    system = [*range(100)]
    keys = [world.submit([*system, 200 + number], 3) for number in range(32)]
    world.plan()
    assert [len(world.scheduler.running), len(world.scheduler.waiting)] == [1, 31]
    while len(world.scheduler.running) < 32:
        world.plan()
        world.complete()
        world.scheduler.check_invariants()
    tables = [request.trunk.table for request in world.scheduler.running]
    assert len({tuple(table.blocks[:25]) for table in tables if table is not None}) == 1
    world.run()
    assert world.scheduler.counters.prefill_tokens == 100 + 32
    assert world.scheduler.counters.prefix_hit_tokens == 31 * 100
    for key in keys:
        world.check_answer(key)


def test_who_waits_for_a_prefix_is_passed_by_others() -> None:
    world = World(blocks=32, block_size=2, max_running=4, max_step_tokens=6)
    first, second = (world.submit([1, 2, 3, 4, 5, 6, 7, 8, last], 2) for last in (9, 10))
    other = world.submit([20], 2)
    world.plan()
    world.plan()
    assert [request.submission.key for request in world.scheduler.running] == [first, other]
    assert [request.submission.key for request in world.scheduler.waiting] == [second]
    world.run()
    for key in (first, second, other):
        world.check_answer(key)


def test_nobody_waits_for_less_than_a_whole_block_or_for_the_last_token() -> None:
    world = World(blocks=32, block_size=4, max_step_tokens=32)
    world.submit([1, 2, 3, 4, 5, 6], 2)
    world.submit([1, 2, 3, 7, 8, 9], 2)
    world.submit([1, 2, 3, 4], 2)
    world.plan()
    assert len(world.scheduler.running) == 3


def test_nobody_waits_without_a_cache_or_across_salts() -> None:
    for prefix_cache, salts in (False, ["", ""]), (True, ["", "salt"]):
        world = World(blocks=32, block_size=2, max_step_tokens=32, prefix_cache=prefix_cache)
        for salt in salts:
            world.submit(range(9), 2, salt=salt)
        world.plan()
        assert len(world.scheduler.running) == 2


@pytest.mark.parametrize("fate", ["cancelled", "preempted", "failed"])
def test_where_a_leader_goes_the_first_of_its_followers_leads(fate: str) -> None:
    world = World(blocks=14, block_size=2, max_running=4, max_step_tokens=6)
    if fate == "preempted":
        urgent = world.submit([90, 91, 92], 20, priority=-1)
        world.step()
    leader, *followers = (world.submit([*range(1, 10), last], 2, priority=1) for last in (20, 21, 22))
    world.plan()
    assert [request.submission.key for request in world.scheduler.waiting] == followers
    if fate == "cancelled":
        world.scheduler.cancel(leader, EndCode.CANCELLED, "", 0.0)
    elif fate == "failed":
        world.complete()
        world.plan()
        plan = world.in_flight.popleft()
        world.executor.do(plan)
        world.scheduler.complete(plan.step, [Sampled(0, failed=True)] * len(plan.samples), 0.0)
    world.listen()
    world.scheduler.check_invariants()
    world.run()
    if fate == "preempted":
        world.check_answer(urgent)
    for key in followers:
        world.check_answer(key)
    world.check_idle()


def test_a_follower_that_is_cancelled_is_gone() -> None:
    world = World(blocks=32, block_size=2, max_running=4, max_step_tokens=4)
    leader, follower = (world.submit([*range(1, 10), last], 2) for last in (20, 21))
    world.plan()
    assert world.scheduler.cancel(follower, EndCode.CANCELLED, "", 0.0)
    world.listen()
    world.scheduler.check_invariants()
    assert not world.scheduler.waiting
    world.run()
    world.check_answer(leader)


def test_those_who_wait_for_a_prefix_count_in_the_queue() -> None:
    world = World(blocks=32, block_size=2, max_running=4, max_step_tokens=4, max_waiting=2)
    for last in 20, 21, 22:
        if last == 22:
            world.plan()
        world.submit([*range(1, 10), last], 2)
    world.plan()
    assert len(world.scheduler.waiting) == 2
    late = world.submit([5], 2)
    end = world.clients[late].end
    assert end is not None
    assert end.code is EndCode.QUEUE_FULL


def test_an_urgent_follower_raises_its_leader_until_the_prefix_is_there() -> None:
    world = World(blocks=64, block_size=2, max_running=4, max_step_tokens=8)
    first = world.submit([90], 60, priority=1)
    world.step()
    leader = world.submit([*range(1, 40)], 2, priority=2)
    world.step()
    assert [request.submission.key for request in world.scheduler.running] == [first, leader]
    urgent = world.submit([*range(1, 38), 60], 2, priority=0)
    other = world.submit([80], 2, priority=0)
    raised = []
    while urgent in {request.submission.key for request in world.scheduler.waiting}:
        world.step()
        world.scheduler.check_invariants()
        raised.append(world.scheduler.running[0].submission.key == leader)
    assert any(raised[:-1]), "the leader went before those that are more urgent than itself"
    assert all(request.priority == request.submission.priority for request in world.scheduler.running)
    world.run()
    for key in (leader, urgent, other):
        world.check_answer(key)


def test_a_request_that_comes_back_waits_for_what_another_computes() -> None:
    """Its outputs are part of what it needs; a prompt that goes on where they end shares them."""
    world = World(blocks=64, block_size=2, max_running=4, max_step_tokens=4)
    prompt = [*range(1, 9)]
    key = world.submit(prompt, 6)
    world.run()
    outputs = world.clients[key].tokens
    world.memory.flush()
    for last in 50, 51:
        world.submit([*prompt, *outputs, last], 1)
    world.plan()
    assert [len(world.scheduler.running), len(world.scheduler.waiting)] == [1, 1]
    world.run()
    assert world.scheduler.counters.prefix_hit_tokens == len(prompt) + len(outputs)


def test_a_short_failed_prompt_leaves_no_tail() -> None:
    world = World(block_size=8)
    world.submit([1, 2, 3], 5)
    world.plan()
    world.in_flight.clear()
    world.scheduler.complete(1, [Sampled(0, failed=True)], 0.0)
    world.listen()
    assert world.memory.pool.cached == 0


def test_a_stop_string_ends_it_after_as_many_tokens_as_the_gateway_says() -> None:
    world = World()
    key = world.submit([1, 2, 3], 10)
    for _ in range(5):
        world.step()
    world.scheduler.finish(key, 0, 3, 0.0)
    world.listen()
    assert world.clients[key].sequence_end == SequenceEnd(key, 0, 3, FinishReason.STOP)
    assert world.scheduler.counters.finished_requests == 1
    assert world.scheduler.counters.discarded_tokens == 2
    world.run()
    world.check_idle()


@pytest.mark.parametrize("output_tokens", [4, 2**31])
def test_a_finish_of_what_there_is_not_yet_changes_nothing(output_tokens: int) -> None:
    world = World()
    key = world.submit([1, 2, 3], 6)
    for _ in range(3):
        world.step()
    world.scheduler.finish(key, 0, output_tokens, 0.0)
    world.scheduler.finish((9, 9), 0, 0, 0.0)
    world.run()
    world.check_answer(key)
    world.scheduler.finish(key, 0, 1, 0.0)  # it has ended by itself meanwhile
    world.listen()
    world.check_idle()


def test_a_stop_string_ends_a_preempted_one_too() -> None:
    world = crowded()
    world.step()
    assert world.scheduler.waiting[0].submission.key == (1, 2)
    world.scheduler.finish((1, 2), 0, 1, 0.0)
    world.listen()
    assert world.clients[1, 2].sequence_end == SequenceEnd((1, 2), 0, 1, FinishReason.STOP)
    world.run()
    world.check_answer((1, 1))
    world.check_idle()


# --------------------------------------------------------------------------------------- cancels, deadlines, losses


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_a_cancel_frees_at_once_and_no_later_plan_names_the_blocks(in_flight: int) -> None:
    world = World(blocks=16, block_size=2, prefix_cache=False)
    gone, stays = world.submit([1, 2, 3], 20), world.submit([4, 5, 6], 20)
    world.step()
    for _ in range(in_flight):
        world.plan()
    table = next(request.trunk.table for request in world.scheduler.running if request.submission.key == gone)
    assert table is not None
    blocks = set(table.blocks)
    slot = world.scheduler.running[0].trunk.slot
    assert world.scheduler.cancel(gone, EndCode.CANCELLED, "enough", 0.0)
    assert all(world.memory.pool.state(block) is BlockState.FREE for block in blocks)
    world.listen()
    end = world.clients[gone].end
    assert end is not None
    assert (end.code, end.message) == (EndCode.CANCELLED, "enough")
    while world.complete():
        pass
    plan = world.plan()
    assert plan is not None
    assert plan.closes == (slot,)
    assert set(plan.memory.freed) == blocks
    assert [chunk.slot for chunk in plan.chunks] == [1]
    other = next(request.trunk.table for request in world.scheduler.running if request.submission.key == stays)
    assert other is not None
    assert not blocks & (set(other.blocks) - {block for chunk in plan.chunks for block in chunk.new_blocks})
    assert not world.scheduler.cancel(gone, EndCode.CANCELLED, "again", 0.0)
    world.run()
    world.check_answer(stays)
    world.check_idle()


def test_a_cancelled_waiting_one_was_never_planned() -> None:
    world = World(max_running=1)
    world.submit([1], 3)
    waiting = world.submit([2], 3)
    world.step()
    world.scheduler.cancel(waiting, EndCode.CANCELLED, "", 0.0)
    world.run()
    world.check_idle()
    assert world.executor.computed == 3


def test_cancels_in_the_queue_disturb_nobody() -> None:
    world = World(blocks=40, max_running=2)
    streams = [world.submit([number, 5], 40) for number in (2, 3)]
    for number in range(15):
        queued = world.submit([30, number], 5)
        world.plan()
        assert world.scheduler.cancel(queued, EndCode.CANCELLED, "", 0.0)
        world.listen()
        world.complete()
        assert world.clients[queued].tokens == []
    assert len(world.scheduler.running) == 2
    world.run()
    for key in streams:
        world.check_answer(key)
    world.check_idle()


def test_a_deadline_ends_at_the_next_plan() -> None:
    world = World(max_running=1)
    running, waiting = world.submit([1], 20, deadline=5.0), world.submit([2], 20, deadline=4.0)
    world.step()
    world.now = 4.0
    world.plan()
    assert world.clients[waiting].end is not None
    assert world.clients[running].end is None
    world.complete()
    world.now = 6.0
    plan = world.plan()
    assert plan is not None
    assert (plan.chunks, plan.closes) == ((), (0,))
    for key in (running, waiting):
        end = world.clients[key].end
        assert end is not None
        assert end.code is EndCode.DEADLINE
    world.run()
    world.check_idle()


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    world = World(max_waiting=2)
    for _ in range(50):
        key = world.submit([1], 1, deadline=1e9)
        world.run()
        world.check_answer(key)
    assert len(world.scheduler._registry._deadlines) <= 5


def test_everything_ends_where_the_executor_is_lost() -> None:
    world = World(max_running=1)
    keys = [world.submit([number], 9) for number in range(3)]
    world.plan()
    world.plan()
    world.scheduler.abandon(EndCode.UNAVAILABLE, "gone", 0.0)
    world.listen()
    for key in keys:
        end = world.clients[key].end
        assert end is not None
        assert (end.code, end.message) == (EndCode.UNAVAILABLE, "gone")
    assert world.scheduler.plans_in_flight == 0
    world.scheduler.check_invariants()


def test_nothing_is_counted_as_held_once_the_executor_is_lost() -> None:
    """The counters go on in the next executor's session, whose pool begins empty."""
    world = World()
    world.submit(range(20), 1)
    world.run()
    assert world.memory.pool.cached
    world.scheduler.abandon(EndCode.UNAVAILABLE, "gone", 0.0)
    counters = world.memory.counters
    assert counters.allocated_blocks == counters.freed_blocks > 0
    assert counters.evicted_blocks == 0
    Memory(64, 4, prefix_cache=True, counters=counters).check_invariants()


def test_a_result_out_of_turn_is_our_own_bug() -> None:
    world = World()
    world.submit([1], 3)
    world.plan()
    with pytest.raises(AssertionError, match="was due"):
        world.scheduler.complete(2, [Sampled(1)], 0.0)


# ------------------------------------------------------------------------------------------------------- refusals


def submit_raw(world: World, key: tuple[int, int], name: str, tenant: str = "tenant", prompt: int = 1) -> bool:
    submission = Submission(key, tenant, name, array("I", [1] * prompt), None, 3, frozenset())
    return world.scheduler.submit(submission, 0.0)


def refusals(world: World) -> list[tuple[tuple[int, int], EndCode]]:
    return [(event.key, event.code) for event in world.scheduler.take_events() if isinstance(event, RequestEnd)]


def test_a_name_is_taken_once_in_a_tenant() -> None:
    world = World()
    assert submit_raw(world, (1, 1), "a")
    assert submit_raw(world, (2, 1), "a")  # of another gateway, too
    assert submit_raw(world, (2, 2), "a", tenant="other")
    assert refusals(world) == [((2, 1), EndCode.DUPLICATE)]
    found = world.scheduler.find("tenant", "a")
    assert found is not None
    assert found.submission.key == (1, 1)
    assert world.scheduler.find("tenant", "b") is None
    world.scheduler.cancel((1, 1), EndCode.CANCELLED, "", 0.0)
    assert world.scheduler.find("tenant", "a") is None
    assert submit_raw(world, (2, 3), "a")
    assert refusals(world) == [((1, 1), EndCode.CANCELLED)]
    assert world.scheduler.counters.rejected_requests == 1


def test_a_key_is_used_once() -> None:
    world = World()
    assert submit_raw(world, (1, 1), "a")
    assert not submit_raw(world, (1, 1), "b")
    assert refusals(world) == []
    assert world.scheduler.counters.rejected_requests == 0


def test_a_full_queue_refuses() -> None:
    world = World(max_waiting=2)
    for number in range(3):
        submit_raw(world, (1, number), str(number))
    assert refusals(world) == [((1, 2), EndCode.QUEUE_FULL)]
    world.scheduler.plan(0.0)  # both run now
    assert submit_raw(world, (1, 3), "3")
    assert refusals(world) == []


def test_what_never_fits_is_refused_at_once() -> None:
    world = World(blocks=4, block_size=4, context_length=14)
    submit_raw(world, (1, 1), "fits", prompt=13)
    submit_raw(world, (1, 2), "does not", prompt=14)
    assert refusals(world) == [((1, 2), EndCode.NEVER_FITS)]
    plan = world.scheduler.plan(0.0)
    assert rows(plan) == [(0, 0, 13)]


# ---------------------------------------------------------------------------------------------------- prefix cache


def test_thirty_requests_share_one_system_prompt() -> None:
    world = World(blocks=400, block_size=16, max_running=32, max_step_tokens=256, context_length=2000, vocabulary=1000)
    system = [number % 991 for number in range(800)]
    world.submit([*system, 1], 4)
    world.run()
    keys = [world.submit([*system, 2, number], 4) for number in range(30)]
    world.step()
    assert not world.scheduler.waiting
    assert world.memory.pool.shared == 50
    assert world.memory.pool.live <= 50 + 30 * 2
    world.run()
    for key in keys:
        end = world.clients[key].end
        assert end is not None
        assert end.cached_tokens >= 784
        world.check_answer(key)
    world.check_idle()


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
def test_the_second_turn_finds_the_first_but_for_its_last_token(block_size: int) -> None:
    world = World(blocks=400 // block_size, block_size=block_size, vocabulary=1000)
    first = world.submit(range(1, 38), 12)
    world.run()
    world.check_answer(first)
    history = [*range(1, 38), *world.clients[first].tokens]
    second = world.submit([*history, 5, 6, 7], 3)
    world.run()
    world.check_answer(second)
    end = world.clients[second].end
    assert end is not None
    assert end.cached_tokens == len(history) - 1
    world.check_idle()


@pytest.mark.parametrize("tail", [[], [49, 48, 47]], ids=["the same", "the same and more"])
def test_what_was_evicted_and_given_away_is_no_hit(tail: list[int]) -> None:
    world = World(blocks=8, block_size=4)
    prompt = list(range(16))
    first = world.submit(prompt, 4)
    world.run()
    for number in range(6):
        world.submit([20 + number] * 17, 4)
        world.run()
    again = world.submit([*prompt, *tail], 4)
    warm = world.submit([*prompt, *tail], 4)
    world.run()
    for key in world.clients:
        world.check_answer(key)
    found = [end.cached_tokens for key in (first, again, warm) if (end := world.clients[key].end) is not None]
    assert found[:2] == [0, 0]
    world.check_idle()


def test_a_request_is_counted_when_it_is_admitted_and_not_while_it_waits() -> None:
    """A pool that is full, and one with a warm prefix that can't be admitted for many steps."""
    world = World(blocks=10, block_size=4)
    world.submit(range(20), 1)
    world.run()
    world.submit(range(30, 38), 14)
    world.step()
    warm = world.submit([*range(20), *range(40, 50)], 2)
    counters = world.scheduler.counters
    before = (counters.prefix_query_tokens, counters.prefix_hit_tokens)
    waited = 0
    while world.scheduler.waiting:
        assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == before
        world.step()
        waited += 1
    assert waited > 5
    world.run()
    end = world.clients[warm].end
    assert end is not None
    assert counters.prefix_query_tokens == before[0] + 30
    assert counters.prefix_hit_tokens == before[1] + end.cached_tokens
    world.check_answer(warm)
    world.check_idle()


def test_prompts_that_share_nothing_hit_nothing_however_often_they_are_preempted() -> None:
    world = World(blocks=12, block_size=2, max_step_tokens=16)
    for number in range(5):
        world.submit([10 * number + at for at in range(7)], 9)
    world.run()
    counters = world.scheduler.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (5 * 7, 0)
    assert all(client.end is not None and client.end.cached_tokens == 0 for client in world.clients.values())
    world.check_idle()


def test_a_waiting_request_tells_how_long() -> None:
    world = World(max_running=1)
    world.submit([1], 2)
    second = world.submit([2], 2)
    world.step()
    world.now = 3.0
    world.run()
    end = world.clients[second].end
    assert end is not None
    assert end.queue_seconds == 3.0
    third = world.submit([3], 2)
    world.now = 5.0
    world.scheduler.cancel(third, EndCode.CANCELLED, "", 5.0)
    world.listen()
    end = world.clients[third].end
    assert end is not None
    assert end.queue_seconds == 2.0


# ---------------------------------------------------------------------------------------------------------- values


def test_limits_hold_a_token_of_each_running_sequence() -> None:
    with pytest.raises(AssertionError):
        Limits(max_running=3, max_waiting=1, max_step_tokens=2, context_length=5)


def test_events_come_in_order_and_once() -> None:
    world = World()
    submit_raw(world, (1, 1), "a")
    plan = world.scheduler.plan(0.0)
    assert plan is not None
    world.scheduler.complete(1, [Sampled(5, logprob="how likely")], 0.0)
    assert world.scheduler.take_events() == [NewToken((1, 1), 0, 0, 5, "how likely")]
    assert world.scheduler.take_events() == []


# ------------------------------------------------------------------------------ what is told of prompts, and histories


def told_rows(plan: Plan | None) -> list[tuple[int, int, list[int]]]:
    """Return (chunk, first row, targets) of a plan's tellings."""
    assert plan is not None
    return [(telling.chunk, telling.first, list(telling.targets)) for telling in plan.tellings]


def test_a_prompt_is_told_of_chunk_by_chunk_but_for_its_first_token() -> None:
    world = World(block_size=4, max_step_tokens=8)
    key = world.submit(range(10, 30), 2, prompt_alternatives=0)
    assert told_rows(world.plan()) == [(0, 0, [*range(11, 19)])]
    assert told_rows(world.plan()) == [(0, 0, [*range(19, 27)])]
    world.complete()
    assert told_rows(world.plan()) == [(0, 0, [27, 28, 29])]
    world.run()
    assert world.clients[key].told == [*range(11, 30)]
    world.check_answer(key)


def test_a_prompt_of_one_token_has_nothing_to_tell_of() -> None:
    world = World()
    key = world.submit([5], 2, prompt_alternatives=0)
    assert told_rows(world.plan()) == []
    world.run()
    assert world.clients[key].told == []
    world.check_answer(key)


def test_a_prompt_that_is_told_of_is_computed_whole_and_leads_and_follows_nobody() -> None:
    world = World(block_size=4, max_step_tokens=64)
    prompt = [*range(20)]
    world.submit(prompt, 1)
    world.run()
    told = world.submit(prompt, 1, prompt_alternatives=0)
    assert rows(world.plan()) == [(0, 0, 20)]
    world.run()
    plain = world.submit(prompt, 1)
    assert rows(world.plan()) == [(0, 19, 1)]
    world.run()
    assert world.clients[told].told == prompt[1:]
    for key, cached in (told, 0), (plain, 19):
        end = world.clients[key].end
        assert end is not None
        assert end.cached_tokens == cached
        world.check_answer(key)


def test_a_step_tells_of_so_many_prompt_tokens_and_no_more() -> None:
    world = World(block_size=4, blocks=200, max_step_tokens=300)
    first, second = (world.submit(range(start, start + 150), 1, prompt_alternatives=0) for start in (0, 200))
    other = world.submit(range(500, 600), 1)
    plan = world.step()
    assert rows(plan) == [(0, 0, 128), (2, 0, 100)]
    assert rows(world.step()) == [(0, 128, 22), (1, 0, 106)]
    assert rows(world.step()) == [(1, 106, 44)]
    world.run()
    assert world.clients[first].told == [*range(1, 150)]
    assert world.clients[second].told == [*range(201, 350)]
    for key in (first, second, other):
        world.check_answer(key)


def test_what_was_told_of_a_prompt_before_a_preemption_is_not_told_again() -> None:
    world = World(block_size=4, blocks=14, max_step_tokens=8, max_prompt_rows=4)
    told = world.submit(range(40), 2, priority=1, prompt_alternatives=0)
    world.step()
    world.step()
    assert world.clients[told].told == [*range(1, 9)]
    urgent = [world.submit(range(100 * number, 100 * number + 6), 20) for number in (1, 2)]
    world.run()
    end = world.clients[told].end
    assert end is not None
    assert end.preemptions > 0
    assert world.clients[told].told == [*range(1, 40)]
    for key in (told, *urgent):
        world.check_answer(key)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_sequence_that_comes_back_brings_all_its_outputs(samples: int) -> None:
    """The executor of the tests insists that it has counted as many outputs as there are, whenever it samples one."""
    world = World(block_size=4, blocks=16, max_step_tokens=16)
    keys = [
        world.submit(range(9 * number, 9 * number + 9), 14, samples=samples, priority=number, counts_tokens=True)
        for number in range(3 if samples > 1 else 5)
    ]
    world.run()
    assert world.scheduler.counters.preemptions > 0
    for key in keys:
        world.check_answer(key)
        for outputs in world.clients[key].outputs.values():
            assert tuple(outputs) in world.executor.histories


def test_histories_that_a_plan_has_no_room_for_begin_later() -> None:
    world = World(block_size=4, blocks=100, max_history_tokens=19)
    long = [world.submit(range(10), 3, counts_tokens=True, salt=str(number)) for number in range(4)]
    plain = world.submit(range(50, 55), 3)  # it is small, and passes
    opened = [len(plan.opens) for _ in range(5) if (plan := world.step()) is not None]
    assert opened == [2, 1, 1, 1, 0]
    world.run()
    for key in (*long, plain):
        world.check_answer(key)
