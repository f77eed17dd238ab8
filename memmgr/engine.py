"""The loop of the memory manager: drain the inboxes, plan, send what there is. One thread owns all of its state.

Knows who speaks (gateways, one executor, the admin API's threads) and how they are fenced; not how memory is decided. Questions
from other threads are answered between steps, so that each answer is one consistent instant.
"""

import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

import zmq
from google.protobuf.message import Message

from kilburn.config import MemmgrConfig
from kilburn.errors import KilburnError, StartError
from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS, MAX_QUOTAS, PEER_TIMEOUT_SECONDS, PROTOCOL
from kilburn.log import Logger
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.hub import Hub, Incoming
from memmgr.core.events import NO_BLOCK, STARTED, Record
from memmgr.core.quotas import Quota
from memmgr.core.table import MemoryCounters
from memmgr.events import EventLog
from memmgr.journal.recording import Journal
from memmgr.messages import MessageError, check_hello, read_submit, token_batches
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Limits, RequestEnd
from memmgr.session import Session, StepTotals, Totals

AnswerT = TypeVar("AnswerT")

#: Questions waiting for the loop. A step takes milliseconds; whoever finds the queue full asks again.
MAX_QUESTIONS: Final = 256

#: Questions answered between two steps, so that a flood of them can't hold the steps up.
_QUESTIONS_AT_ONCE: Final = 16

#: How long the loop sleeps where nothing comes, in milliseconds: half a heartbeat's interval.
_POLL_MS: Final = int(HEARTBEAT_INTERVAL_SECONDS * 500)

#: The budget of a step where nothing was said, in tokens, by the executor's device.
_STEP_TOKENS_CPU: Final = 256
_STEP_TOKENS_GPU: Final = 2048


class EngineBusyError(Exception):
    """Too many questions wait already."""


class TooManyQuotasError(KilburnError):
    """As many tenants as may have a quota have one."""


@dataclass(slots=True)
class _Gateway:
    attempt: int
    heard: float
    spoke: float


class Engine:
    """See the module. `ask` may be called from any thread, all else belongs to the thread that calls `run`."""

    def __init__(
        self,
        config: MemmgrConfig,
        incarnation: int,
        context: "zmq.Context[zmq.Socket[bytes]]",
        log: Logger,
        journal: Journal | None = None,
    ) -> None:
        """Bind both sockets. What the memory does is told to `journal`, which is the caller's to close.

        Raises:
            StartError: one can't be bound.
        """
        self.incarnation: Final = incarnation
        self.totals: Final = Totals(MemoryCounters(), ScheduleCounters(), StepTotals())
        self.session: Session | None = None
        self.quotas: Final[dict[str, Quota]] = {}  # by tenant, as they were set; they outlive executors
        self.events: Final = EventLog()
        self._records: list[Record] = []  # what happened to blocks since the log last took it in
        self._config = config
        self._log = log
        self._journal = journal
        self._gateways = Hub(context, config.gateway_endpoint, incarnation)
        try:
            self._executors = Hub(context, config.executor_endpoint, incarnation)
        except StartError:
            self._gateways.close()  # or the context waits for it for ever
            raise
        self._gateway_states: dict[int, _Gateway] = {}
        self._executor_spoke = 0.0
        self._reason = "no executor has connected yet"
        self._stopping = False
        self._questions: queue.Queue[Callable[[], None]] = queue.Queue(MAX_QUESTIONS)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._gateways.socket, self._executors.socket, self._wake):
            self._poller.register(source, zmq.POLLIN)

    @property
    def gateways(self) -> int:
        """How many gateways are connected."""
        return len(self._gateway_states)

    @property
    def fenced(self) -> int:
        """Messages dropped because they were another incarnation's, duplicates, or not readable."""
        return self._gateways.fenced + self._executors.fenced

    def take_events(self) -> int:
        """Take into the log what has happened to blocks, and return the last event's cursor."""
        size = 1 if self.session is None else self.session.model.block_size
        self.events.take(self._records, time.time(), self.totals.schedule.planned_steps, size)
        return self.events.cursor

    # ------------------------------------------------------------------------------------------ from other threads

    def ask(self, question: Callable[[], AnswerT]) -> "Future[AnswerT]":
        """Have `question` answered between two steps.

        Raises:
            EngineBusyError: too many wait already.
        """
        answer: Future[AnswerT] = Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # who asked has stopped waiting; from here on that can't happen
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        try:
            self._questions.put_nowait(reply)
        except queue.Full as error:
            raise EngineBusyError from error
        os.eventfd_write(self._wake, 1)
        return answer

    def stop(self) -> None:
        """End `run` after its current round. Safe in a signal handler and in any thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    # -------------------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            self._poller.poll(_POLL_MS)
            self._drain()
            self._watch(time.monotonic())
            self._step(time.monotonic())
            self._flush()
            self.take_events()
            if self._journal is not None:
                self._journal.flush()  # the plans have left: the executor does not wait for a disk
        if self.session is not None:
            self._executors.send(self.session.incarnation, engine.Goodbye())
        self._lose_executor("the memory manager is stopping", in_order=True)
        self._flush()
        for gateway in list(self._gateway_states):
            self._gateways.send(gateway, engine.Goodbye())

    def close(self) -> None:
        """Close the sockets."""
        self._gateways.close()
        self._executors.close()
        os.close(self._wake)

    def _drain(self) -> None:
        now = time.monotonic()
        for incoming in self._executors.drain():
            self._from_executor(incoming, now)
        for incoming in self._gateways.drain():
            self._from_gateway(incoming, now)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        for _ in range(_QUESTIONS_AT_ONCE):
            try:
                reply = self._questions.get_nowait()
            except queue.Empty:
                return
            reply()
        os.eventfd_write(self._wake, 1)  # the rest after the next step

    def _step(self, now: float) -> None:
        session = self.session
        if session is None:
            return
        while (plan := session.next_plan(now)) is not None:
            self.take_events()  # plan by plan: each event has its step
            began = time.perf_counter_ns()
            sent = self._tell_executor(session, plan, now)
            self.totals.steps.transport += time.perf_counter_ns() - began
            if not sent:
                return

    def _flush(self) -> None:
        """Send each gateway all that is new for it."""
        if self.session is None:
            return
        now = time.monotonic()
        for gateway, batch in token_batches(self.session.scheduler.take_events()).items():
            self._tell_gateway(gateway, batch, now)

    def _watch(self, now: float) -> None:
        """Notice who fell silent, and speak to whom nothing was said for a while."""
        if self.session is not None:
            self.session.expire(now)
            reason = self.session.death(now)
            if reason:
                self._lose_executor(reason)
            elif now - self._executor_spoke > HEARTBEAT_INTERVAL_SECONDS:
                self._tell_executor(self.session, engine.Heartbeat(), now)
        for incarnation, state in list(self._gateway_states.items()):
            if now - state.heard > PEER_TIMEOUT_SECONDS:
                self._lose_gateway(incarnation, f"silent for {PEER_TIMEOUT_SECONDS} seconds")
            elif now - state.spoke > HEARTBEAT_INTERVAL_SECONDS:
                self._tell_gateway(incarnation, engine.Heartbeat(), now)

    # ---------------------------------------------------------------------------------------------- the executor

    def _from_executor(self, incoming: Incoming, now: float) -> None:
        body = incoming.body
        if incoming.is_hello:
            if isinstance(body, engine.ExecutorHello):
                self._meet_executor(incoming, body, now)
            return
        session = self.session
        if session is None or session.incarnation != incoming.incarnation:
            return  # welcome once, lost since: the hub fences off what comes later
        session.hear(now)
        try:
            if isinstance(body, engine.StepResult):
                session.take_result(body, now)
            elif isinstance(body, engine.ExecutorHeartbeat):
                session.hear_heartbeat(body, now)
            elif isinstance(body, engine.Inspection):
                session.take_inspection(body)
            elif isinstance(body, engine.Goodbye):
                self._lose_executor("the executor has stopped", in_order=True)
        except MessageError as error:
            self._lose_executor(str(error))

    def _meet_executor(self, incoming: Incoming, hello: engine.ExecutorHello, now: float) -> None:
        try:
            check_hello(hello, swap=self._config.preemption == "swap")
        except MessageError as error:
            self._log.error("executor refused", reason=str(error))
            self._executors.refuse(incoming, str(error))
            return
        if self.session is not None:
            if self.session.incarnation == incoming.incarnation and self.session.attempt == hello.attempt:
                if not self._executors.welcome(incoming):  # the hello crossed its Welcome
                    self._lose_executor("the executor has gone")
                return
            self._lose_executor("the executor has said hello anew")
        limits = self._limits(hello)
        self.session = Session(
            incoming.incarnation,
            hello,
            limits,
            self.totals,
            now,
            prefix_cache=self._config.prefix_cache,
            swap=self._config.preemption == "swap",
            records=self._records,
            journal=self._journal,
            quotas=self.quotas.values(),
        )
        self._records.append((STARTED, NO_BLOCK, None, None))
        if not self._executors.welcome(incoming):
            self.session = None
            return
        self._executor_spoke = now
        self._log.info(
            "executor connected",
            model=hello.model.name,
            blocks=hello.model.total_blocks,
            block_size=hello.model.block_size,
            context_length=hello.model.context_length,
            max_running=limits.max_running,
            max_step_tokens=limits.max_step_tokens,
        )
        if self.session.cut_floors:
            self._log.warning("the pool is too small for all that is guaranteed", tenants=self.session.cut_floors)
        self._tell_all_gateways(now)

    def _limits(self, hello: engine.ExecutorHello) -> Limits:
        automatic = _STEP_TOKENS_CPU if hello.model.device == "cpu" else _STEP_TOKENS_GPU
        wanted = self._config.max_step_tokens or max(automatic, self._config.max_running)
        step_tokens = min(wanted, hello.max_step_tokens)
        return Limits(
            max_running=min(self._config.max_running, hello.max_slots, step_tokens),
            max_waiting=self._config.max_waiting,
            max_step_tokens=step_tokens,
            context_length=hello.model.context_length,
        )

    def _tell_executor(self, session: Session, body: Message, now: float) -> bool:
        self._executor_spoke = now
        if self._executors.send(session.incarnation, body):
            return True
        self._lose_executor("the executor has gone")
        return False

    def _lose_executor(self, reason: str, *, in_order: bool = False) -> None:
        """End the session and every request in it. `in_order`: one of the two has stopped as it should."""
        session = self.session
        if session is None:
            return
        if in_order:
            self._log.info("executor left", reason=reason, requests=len(session.scheduler.running))
        else:
            self._log.warning("executor lost", reason=reason, requests=len(session.scheduler.running))
        self._executors.drop(session.incarnation)
        session.scheduler.abandon(EndCode.UNAVAILABLE, f"{reason}; try again", time.monotonic())
        session.close(reason)
        self._flush()
        self.take_events()
        self.session = None
        self._reason = reason
        self._tell_all_gateways(time.monotonic())

    def inspect(self, answer: "Future[tuple[int, list[str]]]") -> None:
        """Ask the executor for its view; `answer` gets (checks, faults)."""
        if not answer.set_running_or_notify_cancel():
            return
        session = self.session
        question = None if session is None else session.inspect(answer)
        if session is None:
            answer.set_result((0, ["no executor is connected"]))
        elif question is None:
            answer.set_result((0, ["too many inspections wait for the executor; try again"]))
        else:
            self._tell_executor(session, question, time.monotonic())

    def set_quota(self, quota: Quota) -> None:
        """Set a tenant's quota, for this executor and those to come; an empty one takes it away. There is an executor.

        Raises:
            TooManyQuotasError: of as many tenants as may have one, none is this.
            QuotaRefusedError: so much can't be guaranteed.
        """
        assert self.session is not None
        if not quota.empty and quota.tenant not in self.quotas and len(self.quotas) >= MAX_QUOTAS:
            raise TooManyQuotasError(f"{MAX_QUOTAS} tenants have a quota already; take one away first")
        self.session.set_quota(quota, time.monotonic())
        self.quotas.pop(quota.tenant, None)
        if not quota.empty:
            self.quotas[quota.tenant] = quota

    # ---------------------------------------------------------------------------------------------- the gateways

    def _from_gateway(self, incoming: Incoming, now: float) -> None:
        body, gateway = incoming.body, incoming.incarnation
        if incoming.is_hello:
            if isinstance(body, engine.GatewayHello):
                self._meet_gateway(incoming, body, now)
            return
        state = self._gateway_states.get(gateway)
        if state is None:
            return
        state.heard = now
        if isinstance(body, engine.Submit):
            self._submit(gateway, body, now)
        elif isinstance(body, engine.Goodbye):
            self._lose_gateway(gateway, "the gateway has stopped", in_order=True)
        elif self.session is None:
            return
        elif isinstance(body, engine.Cancel):
            self.session.scheduler.cancel((gateway, body.handle), EndCode.CANCELLED, "the call has ended", now)
        elif isinstance(body, engine.Finish):
            self.session.scheduler.finish((gateway, body.handle), body.index, body.output_tokens, now)

    def _meet_gateway(self, incoming: Incoming, hello: engine.GatewayHello, now: float) -> None:
        reason = ""
        if hello.protocol != PROTOCOL:
            reason = f"the gateway speaks protocol {hello.protocol}, the memory manager {PROTOCOL}: start one version"
        if reason:
            self._log.error("gateway refused", reason=reason)
            self._gateways.refuse(incoming, reason)
            return
        known = self._gateway_states.get(incoming.incarnation)
        if known is not None and known.attempt != hello.attempt:
            self._lose_gateway(incoming.incarnation, "it has said hello anew")
        if self._gateways.welcome(incoming):
            self._log.info("gateway connected")
            self._gateway_states[incoming.incarnation] = _Gateway(hello.attempt, heard=now, spoke=now)
            self._tell_gateway(incoming.incarnation, self._model_state(), now)
        elif incoming.incarnation in self._gateway_states:
            self._lose_gateway(incoming.incarnation, "it has gone")

    def _submit(self, gateway: int, submit: engine.Submit, now: float) -> None:
        key = (gateway, submit.handle)
        if self.session is None:
            self._refuse(gateway, RequestEnd(key, EndCode.UNAVAILABLE, f"{self._reason}; try again"), now)
            return
        deadline = float("inf")
        if submit.deadline_unix_seconds:
            deadline = now + submit.deadline_unix_seconds - time.time()
        try:
            submission = read_submit(submit, gateway, self.session.model.vocab_size, deadline)
        except MessageError as error:
            self._refuse(gateway, RequestEnd(key, EndCode.INVALID, str(error)), now)
            return
        if not self.session.scheduler.submit(submission, now):
            self._log.error("a gateway used a handle twice", gateway=gateway, handle=submit.handle)
            self._lose_gateway(gateway, "it used a handle twice")

    def _refuse(self, gateway: int, end: RequestEnd, now: float) -> None:
        self.totals.schedule.rejected_requests += 1
        self._tell_gateway(gateway, token_batches([end])[gateway], now)

    def _model_state(self) -> engine.ModelState:
        if self.session is None:
            return engine.ModelState(serving=False, reason=self._reason)
        limits = self.session.scheduler.limits
        return engine.ModelState(
            serving=True, model=self.session.model, max_waiting=limits.max_waiting, max_running=limits.max_running
        )

    def _tell_all_gateways(self, now: float) -> None:
        for gateway in list(self._gateway_states):
            self._tell_gateway(gateway, self._model_state(), now)

    def _tell_gateway(self, gateway: int, body: Message, now: float) -> None:
        state = self._gateway_states.get(gateway)
        if state is None:
            return
        state.spoke = now
        if not self._gateways.send(gateway, body):
            self._lose_gateway(gateway, "it has gone, or does not read what it is sent")

    def _lose_gateway(self, gateway: int, reason: str, *, in_order: bool = False) -> None:
        """End all requests of a gateway: nobody reads them any more. `in_order`: it has stopped as it should."""
        if in_order:
            self._log.info("gateway left", reason=reason)
        else:
            self._log.warning("gateway lost", reason=reason)
        del self._gateway_states[gateway]
        self._gateways.drop(gateway)
        if self.session is None:
            return
        scheduler = self.session.scheduler
        for request in (*scheduler.running, *scheduler.waiting):
            if request.submission.key[0] == gateway:
                scheduler.cancel(request.submission.key, EndCode.CANCELLED, reason, time.monotonic())
