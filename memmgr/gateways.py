"""The gateways that are connected: who they are, whether they live, what they ask for, and what they are told.

What a gateway submits goes to the session that is being served; where there is none it is refused, with the reason. A gateway
that is lost, or does not read what it is sent, takes its requests with it: nobody reads their tokens any more.

Knows gateways and the messages between them and us; not executors, nor when a session begins and ends.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import zmq
from google.protobuf.message import Message

from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS, PEER_TIMEOUT_SECONDS, PROTOCOL
from kilburn.log import Logger
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.hub import Hub, Incoming
from memmgr.messages import MessageError, read_submit, token_batches
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Event, RequestEnd
from memmgr.session import Session


@dataclass(slots=True)
class _Gateway:
    attempt: int
    heard: float
    spoke: float


class Gateways:
    """See the module. `hub` is its own from now on; used by one thread."""

    def __init__(self, hub: Hub, counters: ScheduleCounters, log: Logger) -> None:
        self._hub: Final = hub
        self._counters: Final = counters
        self._log: Final = log
        self._states: Final[dict[int, _Gateway]] = {}  # by incarnation
        self._session: Session | None = None
        self._reason = "no executor has connected yet"

    def __len__(self) -> int:
        """Return how many are connected."""
        return len(self._states)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Readable when one of them has said something."""
        return self._hub.socket

    @property
    def fenced(self) -> int:
        """Messages dropped because they were another incarnation's, duplicates, or not readable."""
        return self._hub.fenced

    # --------------------------------------------------------------------------------------------- what is served

    def serve(self, session: Session, now: float) -> None:
        """Serve a session from now on, and say so to all."""
        self._session = session
        self._tell_all(now)

    def suspend(self, reason: str, now: float) -> None:
        """Serve none from now on, and say why to all; the requests of the last one have been ended."""
        self._session, self._reason = None, reason
        self._tell_all(now)

    # ------------------------------------------------------------------------------------------- what they are told

    def tell_events(self, events: Iterable[Event], now: float) -> None:
        """Send each gateway all that is new for it."""
        for gateway, batch in token_batches(events).items():
            self._tell(gateway, batch, now)

    def watch(self, now: float) -> None:
        """Notice who fell silent, and speak to whom nothing was said for a while."""
        for gateway, state in list(self._states.items()):
            if now - state.heard > PEER_TIMEOUT_SECONDS:
                self._lose(gateway, f"silent for {PEER_TIMEOUT_SECONDS} seconds")
            elif now - state.spoke > HEARTBEAT_INTERVAL_SECONDS:
                self._tell(gateway, engine.Heartbeat(), now)

    def show_life(self, now: float) -> None:
        """Say to those to whom nothing was said for a while that we live; nothing else happens, whether they hear it or not."""
        for gateway, state in self._states.items():
            if now - state.spoke > HEARTBEAT_INTERVAL_SECONDS:
                state.spoke = now
                self._hub.show_life(gateway)

    def say_goodbye(self) -> None:
        """Tell all that this process ends."""
        for gateway in list(self._states):
            self._hub.send(gateway, engine.Goodbye())

    def close(self) -> None:
        """Close the socket."""
        self._hub.close()

    def _tell(self, gateway: int, body: Message, now: float) -> None:
        state = self._states.get(gateway)
        if state is None:
            return
        state.spoke = now
        if not self._hub.send(gateway, body):
            self._lose(gateway, "it has gone, or does not read what it is sent")

    def _tell_all(self, now: float) -> None:
        for gateway in list(self._states):
            self._tell(gateway, self._model_state(), now)

    def _model_state(self) -> engine.ModelState:
        if self._session is None:
            return engine.ModelState(serving=False, reason=self._reason)
        limits = self._session.scheduler.limits
        return engine.ModelState(
            serving=True, model=self._session.model, max_waiting=limits.max_waiting, max_running=limits.max_running
        )

    # ------------------------------------------------------------------------------------------------ what they say

    def hear(self, now: float) -> None:
        """Take in what has arrived from all of them."""
        for incoming in self._hub.drain():
            self._hear(incoming, now)

    def _hear(self, incoming: Incoming, now: float) -> None:
        body, gateway = incoming.body, incoming.incarnation
        if incoming.is_hello:
            if isinstance(body, engine.GatewayHello):
                self._meet(incoming, body, now)
            return
        state = self._states.get(gateway)
        if state is None:
            return
        state.heard = now
        if isinstance(body, engine.Submit):
            self._submit(gateway, body, now)
        elif isinstance(body, engine.Goodbye):
            self._lose(gateway, "the gateway has stopped", in_order=True)
        elif self._session is None:
            return
        elif isinstance(body, engine.Cancel):
            self._session.scheduler.cancel((gateway, body.handle), EndCode.CANCELLED, "the call has ended", now)
        elif isinstance(body, engine.Finish):
            self._session.scheduler.finish((gateway, body.handle), body.index, body.output_tokens, now)

    def _meet(self, incoming: Incoming, hello: engine.GatewayHello, now: float) -> None:
        reason = ""
        if hello.protocol != PROTOCOL:
            reason = f"the gateway speaks protocol {hello.protocol}, the memory manager {PROTOCOL}: start one version"
        if reason:
            self._log.error("gateway refused", reason=reason)
            self._hub.refuse(incoming, reason)
            return
        known = self._states.get(incoming.incarnation)
        if known is not None and known.attempt != hello.attempt:
            self._lose(incoming.incarnation, "it has said hello anew")
        if self._hub.welcome(incoming):
            self._log.info("gateway connected")
            self._states[incoming.incarnation] = _Gateway(hello.attempt, heard=now, spoke=now)
            self._tell(incoming.incarnation, self._model_state(), now)
        elif incoming.incarnation in self._states:
            self._lose(incoming.incarnation, "it has gone")

    def _submit(self, gateway: int, submit: engine.Submit, now: float) -> None:
        key = (gateway, submit.handle)
        if self._session is None:
            self._refuse(gateway, RequestEnd(key, EndCode.UNAVAILABLE, f"{self._reason}; try again"), now)
            return
        deadline = float("inf")
        if submit.deadline_unix_seconds:
            deadline = now + submit.deadline_unix_seconds - time.time()
        try:
            submission = read_submit(submit, gateway, self._session.model.vocab_size, deadline)
        except MessageError as error:
            self._refuse(gateway, RequestEnd(key, EndCode.INVALID, str(error)), now)
            return
        if not self._session.scheduler.submit(submission, now):
            self._log.error("a gateway used a handle twice", gateway=gateway, handle=submit.handle)
            self._lose(gateway, "it used a handle twice")

    def _refuse(self, gateway: int, end: RequestEnd, now: float) -> None:
        self._counters.rejected_requests += 1
        self.tell_events([end], now)

    def _lose(self, gateway: int, reason: str, *, in_order: bool = False) -> None:
        """End all requests of a gateway: nobody reads them any more. `in_order`: it has stopped as it should."""
        if in_order:
            self._log.info("gateway left", reason=reason)
        else:
            self._log.warning("gateway lost", reason=reason)
        del self._states[gateway]
        self._hub.drop(gateway)
        if self._session is None:
            return
        scheduler = self._session.scheduler
        for request in (*scheduler.running, *scheduler.waiting):
            if request.submission.key[0] == gateway:
                scheduler.cancel(request.submission.key, EndCode.CANCELLED, reason, time.monotonic())
