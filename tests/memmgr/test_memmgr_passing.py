"""Who may pass whom in the queue, and when a preempted request comes back."""

from __future__ import annotations

from memmgr.schedule.admission import is_small, margin
from memmgr.schedule.admitting import MAX_LOOKED_BEHIND, MAX_PASSES
from memmgr.schedule.drafts import Draft
from memmgr.schedule.requests import State
from tests.memmgr.memmgr_world import World, answer


def blocked_world() -> tuple[World, int]:
    """A pool of which one request holds more than half for long, and a big one that waits for as much."""
    world = World(blocks=40, block_size=4, max_running=32, max_waiting=200, max_step_tokens=200, vocabulary=200)
    holder = world.submit(range(100, 184), max_tokens=70)
    world.step()
    assert world.scheduler.running[0].submission.key == holder
    return world, 84


def test_small_requests_pass_a_big_one_that_has_no_room() -> None:
    world, length = blocked_world()
    big = world.submit(range(200, 200 + length), max_tokens=4)
    small = world.submit([7, 8, 9], max_tokens=2)
    world.step()
    running = {request.submission.key for request in world.scheduler.running}
    assert small in running
    assert big not in running
    world.run()
    for key in (big, small):
        world.check_answer(key)
    world.check_idle()


def test_a_bounded_number_of_them() -> None:
    world, length = blocked_world()
    big = world.submit(range(200, 200 + length), max_tokens=4)
    keys = [world.submit([number, 8, 9], max_tokens=2) for number in range(1, 61)]
    before: set[tuple[int, int]] = set()
    while world.scheduler.waiting and world.scheduler.waiting[0].submission.key == big:
        head = world.scheduler.waiting[0]
        assert head.passed <= MAX_PASSES
        world.step()
        before |= {request.submission.key for request in world.scheduler.running}
        before |= {key for key in keys if world.clients[key].end is not None}
        world.scheduler.check_invariants()
    passed = [key for key in keys if key in before]
    assert len(passed) >= MAX_PASSES
    first_admitted = {request.submission.key: request.first_admitted_at for request in world.scheduler.running}
    assert first_admitted[big] is not None
    world.run()
    for key in (big, *keys):
        world.check_answer(key)
    world.check_idle()


def test_one_that_needs_as_much_does_not_pass() -> None:
    world, length = blocked_world()
    big = world.submit(range(200, 200 + length), max_tokens=4)
    other = world.submit(range(300, 300 + length // 2 + 1), max_tokens=2)
    world.step()
    assert [request.submission.key for request in world.scheduler.waiting] == [big, other]


def test_only_so_many_are_looked_at_in_a_step() -> None:
    world, length = blocked_world()
    world.submit(range(200, 200 + length), max_tokens=4)
    for number in range(MAX_LOOKED_BEHIND):
        world.submit(range(300 + number, 300 + number + length - 1), max_tokens=2)
    far = world.submit([7, 8, 9], max_tokens=2)
    world.step()
    assert far not in {request.submission.key for request in world.scheduler.running}


def test_nobody_passes_one_that_was_preempted() -> None:
    world = World(blocks=12, block_size=4, vocabulary=200)
    prompts = (range(first, first + 18) for first in range(20, 200))
    long = [prompt for prompt in prompts if len(answer(prompt, 200, 30, 48, frozenset())[0]) == 30]
    first, second = (world.submit(prompt, max_tokens=30) for prompt in long[:2])
    for _ in range(30):
        if not world.scheduler.counters.preemptions:
            world.step()
    assert world.scheduler.waiting[0].submission.key == second
    small = world.submit([7, 8], max_tokens=2)
    world.step()
    world.step()
    assert [request.submission.key for request in world.scheduler.waiting] == [second, small]
    world.run()
    for key in (first, second, small):
        world.check_answer(key)


def test_a_request_needs_more_room_each_time_that_it_was_preempted() -> None:
    world = World()
    world.submit([1, 2, 3])
    request = world.scheduler.waiting[0]
    found = []
    for request.preemptions in range(5):
        found.append(margin(request, 10))
    assert found == [0, 1, 3, 7, 10]
    request.preemptions = 10**6
    assert margin(request, 3) == 3
    assert margin(request, 0) == 0  # alone, it comes back in any case


def test_small_is_half_of_what_waits() -> None:
    world = World(max_running=8, blocks=64)
    for tokens, samples in (([1] * 8, 1), ([1] * 4, 1), ([1] * 4, 2), ([1] * 5, 1)):
        world.submit(tokens, samples=samples)
    big, half, two_halves, more = world.scheduler.waiting
    assert is_small(half, big)
    assert not is_small(two_halves, big)
    assert not is_small(more, big)
    assert big.state is State.WAITING


def test_a_raised_priority_ends_with_the_sample_that_leads() -> None:
    """It came back, was raised by who waits for its prompt, and a stop string ends its trunk before the prompt is there."""
    world = World(blocks=64, block_size=2, max_running=6, max_step_tokens=32, context_length=64)
    wished = world.submit(range(1, 13), max_tokens=14, samples=2, priority=5)
    for _ in range(3):
        world.step()
    request = world.scheduler.find("tenant", "request-1")
    assert request is not None
    Draft(32, world.memory, None, world.scheduler._queues, world.scheduler.counters)._preempt(request)
    world.memory.flush()
    world.plan()
    follower = world.submit([*range(1, 13), 40], max_tokens=3, priority=0)
    world.plan()
    assert request.priority == 0
    world.scheduler.finish(wished, 0, len(world.clients[wished].outputs[0]), world.now)
    assert request.priority == 5
    world.scheduler.check_invariants()
    world.run()
    assert len(world.clients[follower].outputs[0]) == 3
