"""The engine over real sockets: who is welcome, who is fenced off, what ends how when a peer is lost."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path

import pytest

from kilburn.limits import EXECUTOR_STALL_SECONDS, PEER_TIMEOUT_SECONDS, PROTOCOL
from kilburn.v1 import engine_pb2 as engine
from kilburn.v1 import inference_pb2 as inference
from kilburn.wire.envelope import Conversation, parse
from memmgr.questions import MAX_QUESTIONS, EngineBusyError
from memmgr.schedule.plans import RequestKey
from tests.memmgr.conftest import House
from tests.memmgr.memmgr_messages import VOCABULARY, hello, sampling, submit
from tests.memmgr.memmgr_peers import FIRST_TOKEN, PATIENCE_SECONDS, Background, Context, Executor, Gateway, Peer


def serve(executor: Executor, gateway: Gateway, handle: int) -> engine.RequestEnd:
    """Let both go on until a request has ended."""
    end = time.monotonic() + PATIENCE_SECONDS
    while handle not in gateway.ends:
        assert time.monotonic() < end
        executor.pump(0.01)
        gateway.pump(0.01)
    return gateway.ends[handle]


def live(house: House) -> list[RequestKey]:
    """Return the keys of the requests that run or wait."""

    def read() -> list[RequestKey]:
        assert house.engine.session is not None
        scheduler = house.engine.session.scheduler
        return [request.submission.key for request in (*scheduler.running, *scheduler.waiting)]

    return house.ask(read)


def together(*peers: Peer, seconds: float = 0.3) -> None:
    """Let all go on for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for peer in peers:
            peer.pump(0.01)


def occupy(house: House) -> threading.Event:
    """Keep the engine's thread busy until the event is set."""
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(PATIENCE_SECONDS)

    house.engine.ask(wait)
    assert entered.wait(PATIENCE_SECONDS)
    return leave


# ----------------------------------------------------------------------------------------------------- a request


def test_a_request_from_submit_to_end(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    gateway.until(lambda: gateway.serving, "an executor")
    state = gateway.states[-1]
    assert (state.model.name, state.max_waiting, state.max_running) == ("tiny", 1024, 8)
    gateway.send(submit(1, max_tokens=4))
    end = serve(executor, gateway, 1)
    assert end.error == engine.ERROR_CODE_OK
    assert gateway.tokens[1] == [FIRST_TOKEN + number for number in range(4)]
    assert gateway.reasons[1] == inference.FINISH_REASON_LENGTH
    assert [plan.step for plan in executor.plans[:4]] == [1, 2, 3, 4]
    together(executor, gateway)
    assert executor.slots == {}, "what has ended is closed though nothing else is to do"


def test_two_plans_are_out_and_no_third(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1))
    together(executor, gateway)
    assert [plan.step for plan in executor.plans] == [1, 2]


def test_a_gateway_that_waits_learns_of_each_change(house: House) -> None:
    gateway = house.gateway()
    gateway.until(lambda: gateway.states, "a ModelState")
    assert not gateway.serving
    assert "no executor" in gateway.states[-1].reason
    executor = house.executor()
    gateway.until(lambda: gateway.serving, "an executor")
    executor.close()
    gateway.until(lambda: not gateway.serving, "the executor's loss")
    assert gateway.states[-1].reason


def test_cancel_and_finish(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    gateway.send(submit(1, max_tokens=50))
    gateway.send(submit(2, max_tokens=50))
    end = time.monotonic() + PATIENCE_SECONDS
    executor.pause_seconds = 0.01
    while len(gateway.tokens.get(2, ())) < 3:
        together(executor, gateway, seconds=0.02)
        assert time.monotonic() < end
    gateway.send(engine.Cancel(handle=1))
    gateway.send(engine.Finish(handle=2, index=0, output_tokens=2))
    gateway.send(engine.Cancel(handle=77))
    gateway.send(engine.Finish(handle=77, index=0, output_tokens=2))
    gateway.send(engine.Finish(handle=2, index=5, output_tokens=2))
    assert serve(executor, gateway, 1).error == engine.ERROR_CODE_CANCELLED
    assert serve(executor, gateway, 2).error == engine.ERROR_CODE_OK
    assert gateway.reasons[2] == inference.FINISH_REASON_STOP
    together(executor, gateway)
    assert executor.slots == {}
    pool = house.ask(lambda: house.engine.session.scheduler.memory.pool if house.engine.session else None)
    assert pool is not None
    assert pool.live == 0


def test_a_deadline_passes_without_a_word_from_the_gateway(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1, deadline_unix_seconds=time.time() - 1.0))
    assert serve(executor, gateway, 1).error == engine.ERROR_CODE_DEADLINE


# ------------------------------------------------------------------------------------------------------- refusals


def test_without_an_executor_requests_are_unavailable(house: House) -> None:
    gateway = house.gateway()
    gateway.send(submit(1))
    end = gateway.wait_end(1)
    assert end.error == engine.ERROR_CODE_UNAVAILABLE
    assert "no executor has connected yet" in end.message


def test_each_refusal_is_one_end_and_the_next_request_is_fine(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    wrong = {
        1: submit(1, prompt_ids=[]),
        2: submit(2, prompt_ids=[VOCABULARY]),
        3: submit(3, sampling=sampling(temperature=math.nan)),
        4: submit(4, deadline_unix_seconds=math.nan),
        5: submit(5, prompt_ids=[1] * 64),
        6: submit(6, max_tokens=60),
        7: submit(7, request_id="request-6"),
    }
    for message in wrong.values():
        gateway.send(message)
    gateway.send(submit(8))
    assert serve(executor, gateway, 8).error == engine.ERROR_CODE_OK
    assert {handle: gateway.ends[handle].error for handle in (1, 2, 3, 4, 5, 7)} == {
        1: engine.ERROR_CODE_INVALID,
        2: engine.ERROR_CODE_INVALID,
        3: engine.ERROR_CODE_INVALID,
        4: engine.ERROR_CODE_INVALID,
        5: engine.ERROR_CODE_NEVER_FITS,
        7: engine.ERROR_CODE_DUPLICATE,
    }
    assert serve(executor, gateway, 6).error == engine.ERROR_CODE_OK
    assert house.ask(lambda: house.engine.totals.schedule.rejected_requests) == 6


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1])
def test_another_protocol_is_refused_at_the_hello(house: House, protocol: int) -> None:
    gateway = Gateway(house.context, house.config.gateway_endpoint)
    executor = Executor(house.context, house.config.executor_endpoint, hello(protocol=protocol))
    assert isinstance(gateway.hello, engine.GatewayHello)
    gateway.hello.protocol = protocol
    for peer in (gateway, executor):
        peer.connect()
        assert f"protocol {protocol}" in peer.link.refusal
        assert not peer.link.connected
        peer.close()


def test_an_executor_that_cannot_be_worked_with_is_refused_and_the_one_there_stays(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    other = Executor(house.context, house.config.executor_endpoint, hello(context_length=1000))
    other.connect()
    assert "does not fit" in other.link.refusal
    other.close()
    gateway.send(submit(1))
    assert serve(executor, gateway, 1).error == engine.ERROR_CODE_OK


def test_a_stranger_is_fenced_off(house: House) -> None:
    house.executor()
    fenced = house.ask(lambda: house.engine.fenced)
    for endpoint in (house.config.gateway_endpoint, house.config.executor_endpoint):
        stranger = Peer(house.context, endpoint, engine.GatewayHello())
        for receiver in (house.engine.incarnation, house.engine.incarnation ^ 1):
            stranger.socket.send(Conversation(stranger.incarnation, receiver).seal(engine.Heartbeat()))
            assert stranger.socket.poll(int(PATIENCE_SECONDS * 1000))
            answer = parse(stranger.socket.recv())
            assert answer.WhichOneof("body") == "fenced"
            assert (answer.sender, answer.receiver) == (house.engine.incarnation, stranger.incarnation)
        stranger.close()
    assert house.ask(lambda: house.engine.fenced) == fenced + 4


@pytest.mark.parametrize("frames", [[b""], [b"no envelope"], [b"\xff" * 100], [b"a", b"b", b"c"]])
def test_garbage_is_dropped_and_counted(house: House, frames: list[bytes]) -> None:
    gateway = house.gateway()
    fenced = house.ask(lambda: house.engine.fenced)
    gateway.socket.send_multipart(frames)
    together(gateway)
    assert house.ask(lambda: house.engine.fenced) == fenced + 1
    assert gateway.link.connected


# ------------------------------------------------------------------------------------------------- peers are lost


def test_a_hello_repeated_keeps_the_session(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1))
    together(executor, gateway)
    session = house.ask(lambda: house.engine.session)
    executor.repeat_hello()
    gateway.repeat_hello()
    together(executor, gateway)
    assert house.ask(lambda: house.engine.session) is session
    executor.frozen = False
    for plan in list(executor.plans):
        executor.send(executor.do(plan))
    assert serve(executor, gateway, 1).error == engine.ERROR_CODE_OK


def test_a_hello_anew_ends_what_was_running(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1))
    together(executor, gateway)
    executor.lose()
    end = serve(executor, gateway, 1)
    assert end.error == engine.ERROR_CODE_UNAVAILABLE
    assert "hello anew" in end.message
    assert end.message.endswith("try again")
    executor.frozen = False
    gateway.send(submit(2))
    assert serve(executor, gateway, 2).error == engine.ERROR_CODE_OK


def test_a_gateway_that_begins_anew_has_nothing_running(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1))
    together(executor, gateway)
    gateway.lose()
    together(executor, gateway)
    assert live(house) == []


def test_another_executor_takes_over(house: House) -> None:
    first, gateway = house.executor(), house.gateway()
    first.frozen = True
    gateway.send(submit(1))
    together(first, gateway)
    second = house.executor(total_blocks=32)
    assert serve(second, gateway, 1).error == engine.ERROR_CODE_UNAVAILABLE
    gateway.send(submit(2))
    assert serve(second, gateway, 2).error == engine.ERROR_CODE_OK
    first.frozen = False
    first.send(first.do(first.plans[0]))
    first.until(lambda: not first.link.connected, "the first one's being told that it was replaced")
    gateway.send(submit(3))
    assert serve(second, gateway, 3).error == engine.ERROR_CODE_OK


def test_counters_add_up_over_executors(house: House) -> None:
    gateway = house.gateway()
    for number in range(3):
        executor = house.executor()
        gateway.until(lambda: gateway.serving, "an executor")
        gateway.send(submit(number, prompt_ids=list(range(30))))
        assert serve(executor, gateway, number).error == engine.ERROR_CODE_OK
        assert house.ask(lambda: house.engine.session.scheduler.check_invariants() if house.engine.session else 0) > 0


@pytest.mark.parametrize("ending", ["silent", "closed"])
def test_an_executor_that_is_gone_is_noticed_in_time(house: House, ending: str) -> None:
    executor, gateway = house.executor(), house.gateway()
    frozen = time.monotonic()
    executor.frozen = True
    gateway.send(submit(1))
    together(executor, gateway)
    if ending == "closed":
        executor.close()
    began = time.monotonic()
    end = gateway.wait_end(1)
    ended = time.monotonic()
    assert end.error == engine.ERROR_CODE_UNAVAILABLE
    assert ended - began < 5.0
    if ending == "silent":
        # Its last heartbeat was at most one interval before.
        assert ended - frozen > PEER_TIMEOUT_SECONDS - 0.6
        assert "silent" in end.message


def test_an_executor_that_stands_still_is_noticed(house: House) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1))
    began = time.monotonic()
    while 1 not in gateway.ends:
        assert time.monotonic() < began + EXECUTOR_STALL_SECONDS + 3
        executor.send(engine.ExecutorHeartbeat(phase=engine.ExecutorHeartbeat.PHASE_RUNNING, step=1, layer=3))
        together(executor, gateway, seconds=0.2)
    assert gateway.ends[1].error == engine.ERROR_CODE_UNAVAILABLE
    assert "stood still in step 1" in gateway.ends[1].message


@pytest.mark.parametrize(
    "result", [engine.StepResult(step=1, error="a kernel failed"), engine.StepResult(step=2), engine.StepResult(step=1)]
)
def test_a_result_that_cannot_be_used_ends_the_executor(house: House, result: engine.StepResult) -> None:
    executor, gateway = house.executor(), house.gateway()
    executor.frozen = True
    gateway.send(submit(1))
    together(executor, gateway)
    executor.send(result)
    assert serve(executor, gateway, 1).error == engine.ERROR_CODE_UNAVAILABLE
    executor.until(lambda: executor.link.losses, "word of its dismissal")
    executor.frozen = False
    gateway.send(submit(2))
    assert serve(executor, gateway, 2).error in {engine.ERROR_CODE_OK, engine.ERROR_CODE_UNAVAILABLE}
    gateway.until(lambda: gateway.serving, "the executor's return")


def test_a_silent_gateway_holds_nothing(house: House) -> None:
    executor, gone, stays = house.executor(), house.gateway(), house.gateway()
    executor.pause_seconds = 0.02
    gone.send(submit(1, max_tokens=60, request_id="of the one that goes"))
    stays.send(submit(1, max_tokens=60, request_id="of the one that stays"))
    executor.frozen = True
    began = time.monotonic()
    while house.ask(lambda: house.engine.gateways) == 2:
        assert time.monotonic() - began < 5.0
        together(executor, stays, seconds=0.1)
    assert live(house) == [(stays.incarnation, 1)]


def test_an_answer_that_takes_long_is_not_the_peers_silence(house: House) -> None:
    """What they say meanwhile lies in the sockets, and what they hear is that memmgr lives."""
    executor, gateway = house.executor(), house.gateway()
    at_work = [Background(executor), Background(gateway)]
    try:
        future = house.engine.ask(lambda: long_check(house, PEER_TIMEOUT_SECONDS + 1.0))
        assert future.result(PATIENCE_SECONDS) > 2
        time.sleep(0.5)
        assert house.ask(lambda: (house.engine.gateways, house.engine.session is not None)) == (1, True)
    finally:
        for one in at_work:
            one.stop()
    assert (executor.link.losses, gateway.link.losses) == (0, 0)


def long_check(house: House, seconds: float) -> int:
    """Keep the engine's thread busy as a long check does; return how often it let others breathe."""
    assert house.engine.session is not None
    breaths, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2)
        house.engine.session.memory.breathe()
        breaths += 1
    return breaths


def test_a_handle_used_twice_ends_that_gateway_only(house: House) -> None:
    executor, wrong, other = house.executor(), house.gateway(), house.gateway()
    executor.frozen = True
    wrong.send(submit(1, request_id="a"))
    other.send(submit(1, request_id="b"))
    together(executor, wrong, other)
    wrong.send(submit(1, request_id="c"))
    together(executor, wrong, other)
    assert live(house) == [(other.incarnation, 1)]
    wrong.send(engine.Heartbeat())
    together(wrong, executor, other)
    assert wrong.link.losses == 1


@pytest.mark.parametrize("who", ["gateway", "executor"])
def test_a_peer_that_dies_after_a_repeated_hello_does_no_harm(house: House, who: str) -> None:
    """Its second Welcome can't be delivered: it is no peer any more."""
    peer: Peer = house.gateway() if who == "gateway" else house.executor()
    leave = occupy(house)
    peer.repeat_hello()
    time.sleep(0.1)  # it has arrived by now
    peer.close()
    time.sleep(0.2)
    leave.set()
    time.sleep(1.0)  # two heartbeats would have gone to it
    assert house.alive
    assert house.ask(lambda: house.engine.session) is None
    assert house.ask(lambda: house.engine.gateways) == 0


# ------------------------------------------------------------------------------------------------------ questions


def test_a_question_is_answered_between_steps_also_with_an_error(house: House) -> None:
    assert house.ask(lambda: 6 * 7) == 42

    def fail() -> None:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        house.ask(fail)
    assert house.ask(lambda: 1) == 1


def test_who_does_not_wait_for_an_answer_any_more_does_no_harm(house: House) -> None:
    asked: list[int] = []
    leave = occupy(house)
    given_up = house.engine.ask(lambda: asked.append(1))
    assert given_up.cancel()
    leave.set()
    with pytest.raises(CancelledError):
        given_up.result(PATIENCE_SECONDS)
    assert house.ask(lambda: 1) == 1
    assert asked == [], "a question that nobody waits for is not asked"


def test_who_does_not_wait_for_an_inspection_any_more_does_no_harm(house: House) -> None:
    executor = house.executor()
    answer: Future[tuple[int, list[str]]] = Future()
    house.ask(lambda: house.engine.inspect(answer))
    answer.cancel()
    together(executor)
    given_up: Future[tuple[int, list[str]]] = Future()
    given_up.cancel()
    house.ask(lambda: house.engine.inspect(given_up))
    together(executor)
    assert house.alive
    assert house.ask(lambda: 1) == 1


def test_a_flood_of_questions_is_bounded(house: House) -> None:
    leave = occupy(house)
    answers = [house.engine.ask(partial(int, number)) for number in range(MAX_QUESTIONS)]
    with pytest.raises(EngineBusyError):
        house.engine.ask(lambda: 0)
    leave.set()
    assert [answer.result(PATIENCE_SECONDS) for answer in answers] == list(range(MAX_QUESTIONS))


def test_an_inspection_without_an_executor_says_so(house: House) -> None:
    answer: Future[tuple[int, list[str]]] = Future()
    house.ask(lambda: house.engine.inspect(answer))
    assert answer.result(PATIENCE_SECONDS) == (0, ["no executor is connected"])


def test_an_inspection_of_an_executor_that_dies_ends_with_it(house: House) -> None:
    executor = house.executor()
    executor.frozen = True
    answer: Future[tuple[int, list[str]]] = Future()
    house.ask(lambda: house.engine.inspect(answer))
    executor.lose()
    together(executor)
    assert answer.result(PATIENCE_SECONDS) == (0, ["the executor has said hello anew"])


def test_who_stops_in_order_is_not_lost(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    executor, gateway, other = house.executor(), house.gateway(), house.gateway()
    gateway.send(submit(1, prompt_ids=[1, 2, 3], max_tokens=5))
    executor.until(lambda: bool(executor.plans), "a plan")
    gateway.send(engine.Goodbye())
    executor.send(engine.Goodbye())
    other.until(lambda: bool(other.states) and not other.serving, "the executor's leaving")
    assert other.states[-1].reason == "the executor has stopped"
    assert house.ask(lambda: (house.engine.gateways, house.engine.session)) == (1, None)
    captured = capsys.readouterr()
    said = captured.out + captured.err  # where the log goes is another test's choice
    assert "executor left" in said
    assert "gateway left" in said
    assert "lost" not in said


def test_the_memory_manager_says_goodbye_too(runtime_dir: Path, context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    house = House(runtime_dir, context)
    executor, gateway = house.executor(), house.gateway()
    house.engine.stop()
    executor.until(lambda: executor.link.left, "a goodbye")
    gateway.until(lambda: gateway.link.left, "a goodbye")
    assert not executor.link.connected
    assert not gateway.serving
    house.close(stopped=True)
    captured = capsys.readouterr()
    assert "lost" not in captured.out + captured.err
