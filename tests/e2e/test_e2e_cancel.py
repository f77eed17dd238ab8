"""Cancels and deadlines, counted in steps on the wire: what was ended is named by no further plan, and holds no block."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest

from kilburn.v1.admin_pb2 import BLOCK_STATE_LIVE
from kilburn.v1.engine_pb2 import Cancel, StepPlan, Submit
from tests.e2e.calls import Running, ask, greedy
from tests.e2e.place import wait_until
from tests.e2e.system import System
from tests.e2e.tapped import MAX_RUNNING, Tapped

pytestmark = pytest.mark.processes

VICTIM = "victim"
PROMPT = [*range(100, 140)]


@pytest.fixture
def neighbour(tapped: Tapped) -> Iterator[Running]:
    """Keep a stream running, so that there are steps to count; it must go on until it is cancelled itself."""
    running = Running(tapped.system.client, greedy([7, 8, 9], 3000, request_id="neighbour", cache_salt=str(time.monotonic())))
    wait_until(lambda: running.tokens > 0, 60, "the neighbour's first token")
    yield running
    assert not running.done
    running.call.cancel()
    running.wait()


def by_the_client(tapped: Tapped, victim: Running) -> None:
    victim.call.cancel()


def by_name(tapped: Tapped, victim: Running) -> None:
    assert tapped.system.client.cancel(VICTIM)


def by_the_admin(tapped: Tapped, victim: Running) -> None:
    assert tapped.system.admin.cancel_request(VICTIM).found


@pytest.mark.parametrize("cancel", [by_the_client, by_name, by_the_admin])
def test_a_cancelled_request_is_named_by_no_further_plan(
    tapped: Tapped, neighbour: Running, cancel: Callable[[Tapped, Running], None]
) -> None:
    victim = Running(tapped.system.client, greedy(PROMPT, 400, request_id=VICTIM))
    wait_until(lambda: victim.tokens >= 3, 60, "three tokens of the victim")
    slot = tapped.slot_of(VICTIM)
    begun = time.monotonic()
    cancel(tapped, victim)
    assert victim.wait(10).code is grpc.StatusCode.CANCELLED
    applied = time.monotonic() if cancel is by_the_admin else arrival(tapped, begun)
    assert_gone(tapped, neighbour, slot, applied)


def test_a_request_whose_deadline_passes_is_named_by_no_further_plan(tapped: Tapped, neighbour: Running) -> None:
    victim = Running(tapped.system.client, greedy(PROMPT, 3000, request_id=VICTIM), timeout=3)
    wait_until(lambda: victim.tokens >= 3, 60, "three tokens of the victim")
    slot = tapped.slot_of(VICTIM)
    assert victim.wait(10).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_gone(tapped, neighbour, slot, deadline_of(tapped, VICTIM))


def test_a_deadline_that_passes_in_the_queue_costs_no_step(tapped: Tapped) -> None:
    """The batch is full; another request waits for a place in it, and its time ends."""
    streams = [Running(tapped.system.client, greedy([number] * 20, 3000)) for number in range(MAX_RUNNING)]
    wait_until(lambda: all(stream.tokens > 0 for stream in streams), 60, "tokens of all streams")
    opened, before = tapped.slots_opened(), tapped.system.admin.pool().counters
    waiting = Running(tapped.system.client, greedy(PROMPT, 4, request_id=VICTIM), timeout=1)
    wait_until(lambda: tapped.system.admin.pool().waiting == 1, 1, "a request in the queue")
    answer = waiting.wait(10)
    wait_until(lambda: not tapped.is_listed(VICTIM), 5, "its end in the queue")
    after = tapped.system.admin.pool().counters
    assert not any(stream.done for stream in streams), "the batch was not full all the time"
    for stream in streams:
        stream.call.cancel()
        assert stream.wait().code is grpc.StatusCode.CANCELLED
    assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.ids == []
    assert tapped.slots_opened() == opened
    assert after.prefix_query_tokens == before.prefix_query_tokens, "it was admitted"
    assert after.cancelled_requests == before.cancelled_requests + 1


def test_a_cancel_in_the_middle_of_a_long_prompt_frees_all_of_it(tapped: Tapped, neighbour: Running) -> None:
    long = [number * number % 251 for number in range(3000)]
    begun = time.monotonic()
    victim = Running(tapped.system.client, greedy(long, 4, request_id=VICTIM))
    wait_until(lambda: tapped.is_admitted(VICTIM), 60, "the victim's first chunk")
    slot = tapped.slot_of(VICTIM)
    victim.call.cancel()
    assert victim.wait(10).code is grpc.StatusCode.CANCELLED
    assert victim.tokens == 0
    assert_gone(tapped, neighbour, slot, arrival(tapped, begun))


@pytest.mark.parametrize("tokens", [1, 3, None], ids=["after one token", "after three", "by their deadlines"])
def test_many_streams_that_are_given_up_leave_nothing(tiny_system: System, tokens: int | None) -> None:
    gateway, memmgr = (psutil.Process(tiny_system.pid(role)) for role in ("gateway", "memmgr"))

    def give_up(number: int) -> grpc.StatusCode:
        request = greedy([number % 250, 1, 2], 1000)
        if tokens is None:
            return ask(tiny_system.client, request, timeout=0.02).code
        stream = tiny_system.client.generate(request, 60)
        received = 0
        while received < tokens:
            received += len(next(stream).token_ids)
        stream.cancel()
        return stream.code()

    def files() -> list[int]:
        return [process.num_fds() for process in (gateway, memmgr)]

    with ThreadPoolExecutor(8) as threads:
        warm = set(threads.map(give_up, range(40)))
        before = files()
        codes = warm | set(threads.map(give_up, range(160)))
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED if tokens is None else grpc.StatusCode.CANCELLED}
    wait_until(lambda: all(now <= then for now, then in zip(files(), before, strict=True)), 5, "as few open files as before")
    tiny_system.settled()
    assert len(ask(tiny_system.client, greedy([1, 2, 3], 4)).ids) == 4


def arrival(tapped: Tapped, since: float) -> float:
    """Return when the gateway's word that the request is over reached memmgr."""
    wait_until(lambda: bool(tapped.gateway.seen(Cancel, since)), 5, "a Cancel on the wire")
    at, _ = tapped.gateway.seen(Cancel, since)[-1]
    return at


def deadline_of(tapped: Tapped, request_id: str) -> float:
    """Return a request's deadline on our clock."""
    deadline = next(body for _, body in reversed(tapped.gateway.seen(Submit)) if body.request_id == request_id)
    return deadline.deadline_unix_seconds - time.time() + time.monotonic()


def assert_gone(tapped: Tapped, neighbour: Running, slot: int, applied: float) -> None:
    """Insist on what follows on the end of a request at `applied`: one plan may have been under way at that instant, no more."""
    wait_until(lambda: not tapped.is_listed(VICTIM), 5, "the victim's end")
    for block in tapped.system.admin.blocks(state=BLOCK_STATE_LIVE):
        assert all(VICTIM not in holder for holder in block.holders)
    # Plans, not the neighbour's tokens: some of those that come now were computed before `applied`.
    wait_until(lambda: len(tapped.executor.seen(StepPlan, applied)) >= 5 or neighbour.done, 60, "five more steps")
    plans = tapped.executor.seen(StepPlan)
    # From the plan that opened the slot on: what ended the victim may be seen here a moment after the plan that closed it.
    opened = max(place for place, (_, plan) in enumerate(plans) if any(one.slot == slot for one in plan.opens))
    closing = [plan.step for _, plan in plans[opened + 1 :] if slot in plan.closes]
    later = [plan for at, plan in plans if at >= applied]
    naming = [plan.step for plan in later if any(chunk.slot == slot for chunk in plan.chunks)]
    assert len(later) >= 5
    assert len(closing) == 1
    assert closing[0] <= later[0].step + 1
    assert len(naming) <= 1
    assert all(step < closing[0] for step in naming)
