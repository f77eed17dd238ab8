"""A man in the middle of a ZeroMQ link: forwards every frame between memmgr and its peers, and remembers what it said and when.

So a test sees the very plans that went out, and counts in steps instead of seconds. Changes nothing.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import zmq
from google.protobuf.message import Message

from kilburn.v1.engine_pb2 import StepPlan
from kilburn.wire.envelope import body_of, parse
from kilburn.wire.sockets import dealer, router

MessageT = TypeVar("MessageT", bound=Message)
Context = zmq.Context[zmq.Socket[bytes]]

#: Between two looks at whether to end.
_POLL_MS: Final = 50


@dataclass(frozen=True, slots=True)
class Seen:
    """A message that passed, and when, in seconds of time.monotonic()."""

    at: float
    body: Message


class Tap:
    """Listens at `front` for peers, each of which it connects to memmgr at `back`, both ipc:// endpoints."""

    def __init__(self, front: Path, back: Path) -> None:
        self.endpoint = f"ipc://{front}"
        self._back = f"ipc://{back}"
        self._seen: list[Seen] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tap")
        self._fault: BaseException | None = None

    def seen(self, kind: type[MessageT], since: float = 0.0) -> list[tuple[float, MessageT]]:
        """Return the messages of a kind that passed after an instant, in order."""
        return [(seen.at, seen.body) for seen in list(self._seen) if seen.at > since and isinstance(seen.body, kind)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                self._forward(context)
        except BaseException as error:
            self._fault = error

    def _forward(self, context: Context) -> None:
        front = router(context, self.endpoint)
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(_POLL_MS):
                if socket is front:
                    route, frame = front.recv_multipart()
                    if route not in backs:
                        backs[route] = dealer(context.socket(zmq.DEALER), self._back)
                        poller.register(backs[route], zmq.POLLIN)
                    self._pass(backs[route], [frame])
                else:
                    route = next(route for route, back in backs.items() if back is socket)
                    self._pass(front, [route, *socket.recv_multipart()])
        for socket in (front, *backs.values()):
            socket.close(0)

    def _pass(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        self._seen.append(Seen(time.monotonic(), body_of(parse(frames[-1]))))
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # nobody there: as lost as it would be without us
                raise


def tables(plans: list[tuple[float, StepPlan]]) -> dict[int, list[int]]:
    """Return the block table of each slot that is open after these plans, which begin with the executor's first."""
    slots: dict[int, list[int]] = {}
    for _, plan in plans:
        for slot in plan.closes:
            del slots[slot]
        slots |= {opened.slot: [] for opened in plan.opens}
        for chunk in plan.chunks:
            slots[chunk.slot] += chunk.new_blocks
            for edit in chunk.edits:
                slots[chunk.slot][edit.logical] = edit.block
    return slots
