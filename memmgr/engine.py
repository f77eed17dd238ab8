"""The loop of the memory manager: drain the inboxes, plan, send what there is. One thread owns all of its state.

Knows the executor that is connected, and when its session begins and ends; what outlives sessions: totals, quotas, the log of
events. Not who the gateways are (gateways.py), how other threads ask (questions.py), or how memory is decided (session.py).
"""

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final

import zmq
from google.protobuf.message import Message

from kilburn.config import MemmgrConfig
from kilburn.errors import KilburnError, StartError
from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS, MAX_PROMPT_ROWS, MAX_QUOTAS
from kilburn.log import Logger
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.hub import Hub, Incoming
from memmgr.core.events import NO_BLOCK, STARTED, Record
from memmgr.core.quotas import Quota
from memmgr.core.table import MemoryCounters
from memmgr.events import EventLog
from memmgr.gateways import Gateways
from memmgr.journal.recording import Journal
from memmgr.messages import MessageError, check_hello
from memmgr.questions import AnswerT, Questions
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Limits
from memmgr.session import Session, StepTotals, Totals

#: How long the loop sleeps where nothing comes, in milliseconds: half a heartbeat's interval.
_POLL_MS: Final = int(HEARTBEAT_INTERVAL_SECONDS * 500)

#: The budget of a step where nothing was said, in tokens, by the executor's device.
_STEP_TOKENS_CPU: Final = 256
_STEP_TOKENS_GPU: Final = 2048


@contextmanager
def kept_from_collections() -> Iterator[None]:
    """Let no garbage collection look through what the block makes; what of the last such block's is garbage now is collected.

    A pool of millions of blocks is lists of millions of entries. It is for a process to say: it is about all that the process
    has, and takes as long as that is much.
    """
    gc.unfreeze()
    gc.collect()  # or what the last session left would be frozen with this one's pool, and be kept for ever
    yield
    gc.freeze()


class TooManyQuotasError(KilburnError):
    """As many tenants as may have a quota have one."""


class Engine:
    """See the module. `ask` and `stop` may be called from any thread, all else belongs to the one that calls `run`."""

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
        self._gateways = Gateways(Hub(context, config.gateway_endpoint, incarnation), self.totals.schedule, log)
        try:
            self._executors = Hub(context, config.executor_endpoint, incarnation)
        except StartError:
            self._gateways.close()  # or the context waits for it for ever
            raise
        self._questions = Questions()
        self._executor_spoke = 0.0
        self._stopping = False
        self._poller = zmq.Poller()
        for source in (self._gateways.socket, self._executors.socket, self._questions.waker):
            self._poller.register(source, zmq.POLLIN)

    @property
    def gateways(self) -> int:
        """How many gateways are connected."""
        return len(self._gateways)

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
        return self._questions.ask(question)

    def stop(self) -> None:
        """End `run` after its current round. Safe in a signal handler and in any thread."""
        self._stopping = True
        self._questions.wake()

    # -------------------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            self._poller.poll(_POLL_MS)
            self._watch(self._drain())
            self._step(time.monotonic())
            self._flush()
            self.take_events()
            if self._journal is not None:
                self._journal.flush()  # the plans have left: the executor does not wait for a disk
        if self.session is not None:
            self._executors.send(self.session.incarnation, engine.Goodbye())
        self._lose_executor("the memory manager is stopping", in_order=True)
        self._flush()
        self._gateways.say_goodbye()

    def close(self) -> None:
        """Close the sockets."""
        self._gateways.close()
        self._executors.close()
        self._questions.close()

    def _drain(self) -> float:
        """Take in what has arrived, and answer questions; return when we listened.

        Whether somebody is silent is judged by that instant: an answer that takes long is not the peers' silence.
        """
        now = time.monotonic()
        for incoming in self._executors.drain():
            self._from_executor(incoming, now)
        self._gateways.hear(now)
        self._questions.answer_some()
        return now

    def _show_life(self) -> None:
        """Say to our peers that we live, in the middle of an answer that takes long. Other threads run meanwhile, too."""
        now = time.monotonic()
        if self.session is not None and now - self._executor_spoke > HEARTBEAT_INTERVAL_SECONDS:
            self._executor_spoke = now
            self._executors.show_life(self.session.incarnation)
        self._gateways.show_life(now)

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
        if self.session is not None:
            self._gateways.tell_events(self.session.scheduler.take_events(), time.monotonic())

    def _watch(self, now: float) -> None:
        """Notice who fell silent, and speak to whom nothing was said for a while."""
        if self.session is not None:
            self.session.expire(now)
            reason = self.session.death(now)
            if reason:
                self._lose_executor(reason)
            elif now - self._executor_spoke > HEARTBEAT_INTERVAL_SECONDS:
                self._tell_executor(self.session, engine.Heartbeat(), now)
        self._gateways.watch(now)

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
        with kept_from_collections():
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
        self.session.memory.breathe = self._show_life
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
        self._gateways.serve(self.session, now)

    def _limits(self, hello: engine.ExecutorHello) -> Limits:
        automatic = _STEP_TOKENS_CPU if hello.model.device == "cpu" else _STEP_TOKENS_GPU
        wanted = self._config.max_step_tokens or max(automatic, self._config.max_running)
        step_tokens = min(wanted, hello.max_step_tokens)
        return Limits(
            max_running=min(self._config.max_running, hello.max_slots, step_tokens),
            max_prompt_rows=MAX_PROMPT_ROWS,
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
        self._gateways.suspend(reason, time.monotonic())

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
