"""The other sides of engine.proto over real sockets: a gateway and an executor, as small as they can be.

An executor's peer keeps tables and lengths, and samples token 5 + (output number) for everybody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq
from google.protobuf.message import Message

from kilburn.limits import PROTOCOL
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.envelope import Conversation, new_incarnation
from kilburn.wire.link import Link
from kilburn.wire.sockets import dealer

Context = zmq.Context[zmq.Socket[bytes]]

#: Longer than anything here should take.
PATIENCE_SECONDS = 10.0

#: Taken in at once, so that two peers in one thread both get their turn.
MOST_FRAMES = 4

FIRST_TOKEN = 5


class Peer:
    """One connection to the memory manager. Used by one thread."""

    def __init__(self, context: Context, endpoint: str, hello: engine.GatewayHello | engine.ExecutorHello) -> None:
        self.incarnation = new_incarnation()
        self.link = Link(self.incarnation, hello)
        self.socket = dealer(context.socket(zmq.DEALER), endpoint)
        self.hello = hello

    def send(self, body: Message) -> None:
        self.socket.send(self.link.seal(body, time.monotonic()))

    def repeat_hello(self) -> None:
        """Say hello once more, as if its Welcome were late."""
        self.socket.send(Conversation(self.incarnation).seal(self.hello))

    def lose(self) -> None:
        """Believe that the memory manager was lost, as after a silence: the next hello begins anew."""
        self.link.read(Conversation(self.link.peer, self.incarnation).seal(engine.Fenced()), time.monotonic())

    def pump(self, seconds: float) -> None:
        """Listen for up to `seconds`, or until something came; say what is due."""
        due = self.link.due(time.monotonic())
        if due is not None and self.socket.poll(0, zmq.POLLOUT):
            self.socket.send(due)
        if not self.socket.poll(int(seconds * 1000)):
            return
        for _ in range(MOST_FRAMES):
            if not self.socket.poll(0):
                return
            message = self.link.read(self.socket.recv(), time.monotonic())
            if message is not None:
                self.take(message)

    def take(self, message: Message) -> None:
        """Act on a message; a peer that is nobody in particular does not."""

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Go on until something holds."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, f"waited in vain: {what}"
            self.pump(0.05)

    def connect(self) -> None:
        self.until(lambda: self.link.connected or self.link.refusal, "a Welcome")

    def close(self) -> None:
        self.socket.close(0)


class Gateway(Peer):
    """Collects what each request hears."""

    def __init__(self, context: Context, endpoint: str) -> None:
        super().__init__(context, endpoint, engine.GatewayHello(protocol=PROTOCOL, model_fingerprint="f" * 64))
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, int] = {}
        self.ends: dict[int, engine.RequestEnd] = {}
        self.states: list[engine.ModelState] = []

    def take(self, message: Message) -> None:
        if isinstance(message, engine.ModelState):
            self.states.append(message)
        elif isinstance(message, engine.TokenBatch):
            for part in message.sequences:
                known = self.tokens.setdefault(part.handle, [])
                assert part.offset == len(known) or (part.finish_reason and not part.token_ids)
                known.extend(part.token_ids)
                if part.finish_reason:
                    self.reasons[part.handle] = part.finish_reason
            for end in message.ends:
                assert end.handle not in self.ends, "a second end"
                self.ends[end.handle] = end

    @property
    def serving(self) -> bool:
        """What the last ModelState said."""
        return bool(self.states) and self.states[-1].serving

    def wait_end(self, handle: int) -> engine.RequestEnd:
        self.until(lambda: handle in self.ends, f"the end of request {handle}")
        return self.ends[handle]


class Executor(Peer):
    """Does plans as they come; `frozen` leaves them undone while heartbeats go on."""

    def __init__(self, context: Context, endpoint: str, hello: engine.ExecutorHello) -> None:
        super().__init__(context, endpoint, hello)
        self.slots: dict[int, tuple[int, list[int]]] = {}
        self.plans: list[engine.StepPlan] = []
        self.frozen = False
        self.lie = 0  # added to each length that an Inspection tells
        self.pause_seconds = 0.0

    def take(self, message: Message) -> None:
        if isinstance(message, engine.StepPlan):
            self.plans.append(message)
            if message.step == 1:
                self.slots.clear()
            if not self.frozen:
                time.sleep(self.pause_seconds)
                self.send(self.do(message))
        elif isinstance(message, engine.Inspect) and not self.frozen:
            slots = [
                engine.SlotState(slot=slot, length=length + self.lie, table=table) for slot, (length, table) in self.slots.items()
            ]
            self.send(engine.Inspection(id=message.id, slots=slots, checks=1))

    def do(self, plan: engine.StepPlan) -> engine.StepResult:
        for slot in plan.closes:
            del self.slots[slot]
        for opened in plan.opens:
            self.slots[opened.slot] = 0, []
        for chunk in plan.chunks:
            _, table = self.slots[chunk.slot]
            for edit in chunk.edits:
                table[edit.logical] = edit.block
            table.extend(chunk.new_blocks)
            self.slots[chunk.slot] = chunk.start + (len(chunk.token_ids) or 1), table
        return engine.StepResult(step=plan.step, token_ids=[FIRST_TOKEN + row.position for row in plan.samples])


class Background:
    """Keeps a peer going in a thread of its own. The peer must not be used by another one until `stop`."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer")
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.peer.pump(0.02)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
