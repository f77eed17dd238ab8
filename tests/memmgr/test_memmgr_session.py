"""One executor's session: plans in flight, results, liveness with explicit times, the comparison of views."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import pytest

from kilburn.limits import EXECUTOR_STALL_SECONDS, PEER_TIMEOUT_SECONDS
from kilburn.v1 import engine_pb2 as engine
from memmgr.engine import kept_from_collections
from memmgr.messages import MessageError, read_submit
from memmgr.schedule.plans import EndCode
from memmgr.session import MAX_INSPECTIONS, MAX_PLANS_IN_FLIGHT, Session
from tests.memmgr.memmgr_messages import VOCABULARY, session, submit

RUNNING = engine.ExecutorHeartbeat.PHASE_RUNNING
COMPILING = engine.ExecutorHeartbeat.PHASE_COMPILING


def ask(it: Session, handle: int = 1, *, prompt: int = 3, max_tokens: int = 20) -> None:
    message = submit(handle, prompt_ids=list(range(prompt)), max_tokens=max_tokens)
    assert it.scheduler.submit(read_submit(message, 1, VOCABULARY, float("inf")), 0.0)


def result_of(plan: engine.StepPlan | None, token: int = 9) -> engine.StepResult:
    assert plan is not None
    return engine.StepResult(step=plan.step, token_ids=[token] * len(plan.samples))


def alive(
    it: Session, now: float, step: int = 0, layer: int = 0, phase: engine.ExecutorHeartbeat.Phase.ValueType = RUNNING
) -> str:
    it.hear(now)
    it.hear_heartbeat(engine.ExecutorHeartbeat(phase=phase, step=step, layer=layer), now)
    return it.death(now)


# ------------------------------------------------------------------------------------------------------------- steps


def test_at_most_two_plans_are_out() -> None:
    it = session()
    assert it.next_plan(0.0) is None
    ask(it)
    plans = [it.next_plan(0.0) for _ in range(MAX_PLANS_IN_FLIGHT)]
    assert [plan.step for plan in plans if plan is not None] == [1, 2]
    assert it.next_plan(0.0) is None
    it.take_result(result_of(plans[0]), 0.0)
    third = it.next_plan(0.0)
    assert third is not None
    assert third.step == 3
    assert it.next_plan(0.0) is None


def test_what_a_step_took_is_added_up() -> None:
    it = session()
    ask(it)
    for expected in (1, 2):
        result = result_of(it.next_plan(0.0))
        result.times.CopyFrom(engine.StepTimes(wait=5, receive=4, prepare=3, forward=2, sample=1))
        it.take_result(result, 0.0)
        steps = it.totals.steps
        assert (steps.idle, steps.prepare, steps.forward, steps.sample) == (5 * expected, 3 * expected, 2 * expected, expected)
    assert it.totals.steps.planning > 0
    assert it.totals.steps.applying > 0
    assert it.totals.steps.transport > 8


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (engine.StepResult(step=1, error="out of memory"), "could not do step 1: out of memory"),
        (engine.StepResult(step=2, token_ids=[1]), "step 2 came out of turn"),
        (engine.StepResult(step=0), "step 0 came out of turn"),
        (engine.StepResult(step=1), "0 tokens for 1 samples"),
        (engine.StepResult(step=1, token_ids=[1, 1]), "2 tokens for 1 samples"),
        (engine.StepResult(step=1, token_ids=[VOCABULARY]), "outside the vocabulary"),
    ],
)
def test_a_wrong_result_is_the_end_of_an_executor(result: engine.StepResult, reason: str) -> None:
    it = session()
    ask(it)
    it.next_plan(0.0)
    it.next_plan(0.0)
    with pytest.raises(MessageError, match=reason):
        it.take_result(result, 0.0)


def test_a_result_of_nothing_is_refused_too() -> None:
    it = session()
    with pytest.raises(MessageError, match="out of turn"):
        it.take_result(engine.StepResult(step=1), 0.0)
    ask(it)
    plan = it.next_plan(0.0)
    it.take_result(result_of(plan), 0.0)
    with pytest.raises(MessageError, match="out of turn"):
        it.take_result(result_of(plan), 0.0)


# ---------------------------------------------------------------------------------------------------------- liveness


def test_silence_is_death() -> None:
    it = session(now=10.0)
    assert it.death(10.0 + PEER_TIMEOUT_SECONDS) == ""
    assert "silent" in it.death(10.1 + PEER_TIMEOUT_SECONDS)
    it.hear(12.0)
    assert it.death(12.0 + PEER_TIMEOUT_SECONDS) == ""
    assert "silent" in it.death(12.1 + PEER_TIMEOUT_SECONDS)


def test_standing_still_while_a_plan_is_out_is_death() -> None:
    it = session()
    ask(it)
    assert it.next_plan(100.0) is not None
    now = 100.0
    while now <= 100.0 + EXECUTOR_STALL_SECONDS:
        assert alive(it, now) == "", "it stood still with nothing to do before the plan"
        now += 0.5
    assert "stood still in step 0" in alive(it, now)


def test_moving_is_life_however_long_a_step_takes() -> None:
    it = session()
    ask(it)
    it.next_plan(0.0)
    for second in range(0, 100, 4):
        assert alive(it, float(second), step=1, layer=second) == ""
    assert alive(it, 96.0 + EXECUTOR_STALL_SECONDS, step=1, layer=96) == ""
    assert "stood still in step 1" in alive(it, 96.1 + EXECUTOR_STALL_SECONDS, step=1, layer=96)


def test_compiling_is_no_standing_still() -> None:
    it = session()
    ask(it)
    it.next_plan(0.0)
    for second in range(60):
        assert alive(it, float(second), phase=COMPILING) == ""
    assert "stood still" in alive(it, 59.1 + EXECUTOR_STALL_SECONDS)


def test_idle_is_no_standing_still() -> None:
    it = session()
    for second in range(60):
        assert alive(it, float(second)) == ""
    ask(it)
    plan = it.next_plan(60.0)
    assert alive(it, 62.0) == ""
    it.take_result(result_of(plan), 62.0)
    assert alive(it, 60.0 + 2 * EXECUTOR_STALL_SECONDS) == ""


# ------------------------------------------------------------------------------------------------------- inspections


def planned(it: Session) -> engine.Inspection:
    """Return what an executor that has done all plans answers to the next question."""
    slots = [
        engine.SlotState(slot=sequence.slot, length=sequence.table.planned, table=sequence.table.blocks)
        for sequence in (request.trunk for request in it.scheduler.running)
        if sequence.table is not None
    ]
    return engine.Inspection(id=1, slots=slots, checks=100)


def two_running() -> tuple[Session, Future[tuple[int, list[str]]], engine.Inspection]:
    it = session()
    ask(it, 1)
    ask(it, 2, prompt=6)
    it.next_plan(0.0)
    it.next_plan(0.0)
    answer: Future[tuple[int, list[str]]] = Future()
    question = it.inspect(answer)
    assert question is not None
    assert question.id == 1
    return it, answer, planned(it)


def test_equal_views_have_no_faults() -> None:
    it, answer, view = two_running()
    assert not answer.done()
    it.take_inspection(view)
    checks, faults = answer.result(0)
    assert faults == []
    assert checks == 100 + 4


def test_the_view_is_compared_with_what_was_planned_when_it_was_asked_for() -> None:
    it, answer, view = two_running()
    it.take_result(engine.StepResult(step=1, token_ids=[9, 9]), 0.0)
    it.next_plan(0.0)
    it.scheduler.cancel((1, 1), EndCode.CANCELLED, "", 0.0)
    it.next_plan(0.0)
    it.take_inspection(view)
    assert answer.result(0)[1] == []


def test_a_slot_that_was_given_up_and_not_yet_closed_may_be_open() -> None:
    it = session()
    ask(it, 1)
    ask(it, 2)
    it.next_plan(0.0)
    it.next_plan(0.0)
    view = planned(it)
    it.scheduler.cancel((1, 1), EndCode.CANCELLED, "", 0.0)
    answer: Future[tuple[int, list[str]]] = Future()
    assert it.inspect(answer) is not None
    it.take_inspection(view)
    assert answer.result(0)[1] == []


@pytest.mark.parametrize("difference", ["length", "table", "missing", "more", "own"])
def test_a_difference_is_found(difference: str) -> None:
    it, answer, view = two_running()
    if difference == "length":
        view.slots[0].length += 1
    elif difference == "table":
        view.slots[1].table[0] += 1
    elif difference == "missing":
        del view.slots[0]
    elif difference == "more":
        view.slots.add(slot=5, length=1, table=[9])
    else:
        view.faults.append("the pool's header is damaged")
    it.take_inspection(view)
    _, faults = answer.result(0)
    assert len(faults) == 1


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    it, answer, view = two_running()
    it.take_inspection(engine.Inspection(id=77))
    assert not answer.done()
    it.take_inspection(view)
    it.take_inspection(view)
    assert answer.result(0)[1] == []


def test_questions_that_wait_are_bounded_and_end_with_the_session() -> None:
    it = session()
    answers: list[Future[tuple[int, list[str]]]] = [Future() for _ in range(MAX_INSPECTIONS + 1)]
    asked = [it.inspect(answer) for answer in answers]
    assert None not in asked[:-1]
    assert asked[-1] is None
    it.close("the executor has gone")
    assert [answer.result(0) for answer in answers[:-1]] == [(0, ["the executor has gone"])] * MAX_INSPECTIONS


def test_what_the_pool_held_is_freed_with_its_session() -> None:
    it = session()
    ask(it, prompt=9)
    it.take_result(result_of(it.next_plan(0.0)), 0.0)
    it.scheduler.cancel((1, 1), EndCode.CANCELLED, "", 0.0)
    assert it.scheduler.memory.pool.cached > 0
    it.close("the executor has gone")
    counted = it.totals.memory
    assert counted.allocated_blocks == counted.freed_blocks > 0


@pytest.mark.parametrize("frozen", [False, True], ids=["young", "frozen by the session before"])
def test_what_the_last_session_left_is_collected(frozen: bool) -> None:
    """A request and its sequences know each other: only a collection finds that they are gone."""

    class Left:
        me: Left

    left = Left()
    left.me = left
    if frozen:
        gc.freeze()
    gone = weakref.ref(left)
    del left
    gc.disable()
    try:
        with kept_from_collections():
            session()
    finally:
        gc.enable()
        gc.unfreeze()
    assert gone() is None
