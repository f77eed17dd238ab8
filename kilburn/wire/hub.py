"""The binding side: one ROUTER socket on which memmgr hears one kind of peer.

Knows routes, incarnations and fencing; not what a message means. A peer speaks on the route of its hello; the executor's
heartbeats come on a second route of the same incarnation, from which nothing but heartbeats is expected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from google.protobuf.message import Message

from kilburn.errors import WireError
from kilburn.v1.engine_pb2 import ExecutorHeartbeat, Fenced, Heartbeat, Welcome
from kilburn.wire.envelope import Conversation, Verdict, body_of, parse
from kilburn.wire.sockets import router

#: Frames read in one drain, so that a flood can't keep the owner from its steps.
_MAX_DRAINED: Final = 256

#: Peers of one kind that are welcome at once, and routes of theirs (two each).
_MAX_PEERS: Final = 64


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message. `is_hello`: its sender speaks to nobody in particular, and is not yet a peer."""

    incarnation: int
    route: bytes
    body: Message
    is_hello: bool


class Hub:
    """See the module. Used by one thread."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, own: int) -> None:
        self.fenced = 0
        self._own = own
        self._endpoint = endpoint
        self._routes: dict[int, bytes] = {}  # incarnation -> the route of its hello
        self._conversations: dict[bytes, Conversation] = {}
        self.socket = router(context, endpoint)

    @property
    def peers(self) -> frozenset[int]:
        """Incarnations that are welcome now."""
        return frozenset(self._routes)

    def drain(self) -> Iterator[Incoming]:
        """Yield what has arrived, at most a bounded number of messages, without waiting."""
        for _ in range(_MAX_DRAINED):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            incoming = self._read(frames)
            if incoming is not None:
                yield incoming

    def welcome(self, incoming: Incoming) -> bool:
        """Make the sender of a hello a peer, and say so to it. False: there are too many, or it is gone again."""
        if incoming.incarnation not in self._routes and len(self._routes) >= _MAX_PEERS:
            return self.refuse(incoming, f"memmgr serves at most {_MAX_PEERS} peers of this kind")
        known = self._conversations.get(incoming.route)
        if known is not None and known.peer != incoming.incarnation:
            return self.refuse(incoming, "this connection is another peer's")
        if self._routes.get(incoming.incarnation) != incoming.route:
            self.drop(incoming.incarnation)
            self._routes[incoming.incarnation] = incoming.route
            self._conversations[incoming.route] = Conversation(self._own, incoming.incarnation)
        # On a route that is known the numbers go on: to the peer, fresh ones would be duplicates.
        return self.send(incoming.incarnation, Welcome())

    def refuse(self, incoming: Incoming, reason: str) -> bool:
        """Answer a hello with a refusal. Always False."""
        self._send(incoming.route, Conversation(self._own, incoming.incarnation).seal(Welcome(refusal=reason)))
        return False

    def send(self, incarnation: int, body: Message) -> bool:
        """Send to a peer. False: it is gone, or so far behind that its queue is full; it is then no peer any more."""
        route = self._routes[incarnation]
        if self._send(route, self._conversations[route].seal(body)):
            return True
        self.drop(incarnation)
        return False

    def show_life(self, incarnation: int) -> None:
        """Say to a peer that we live, whether it hears it or not."""
        if (route := self._routes.get(incarnation)) is not None:
            self._send(route, self._conversations[route].seal(Heartbeat()))

    def drop(self, incarnation: int) -> None:
        """Forget a peer: what it says from now on is fenced off."""
        self._routes.pop(incarnation, None)
        for route in [route for route, talk in self._conversations.items() if talk.peer == incarnation]:
            del self._conversations[route]

    def close(self) -> None:
        """Close the socket and remove its path: ZeroMQ leaves it."""
        self.socket.close()
        Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _read(self, frames: list[bytes]) -> Incoming | None:
        if len(frames) != 2:
            self.fenced += 1
            return None
        route, frame = frames
        try:
            envelope = parse(frame)
        except WireError:
            self.fenced += 1
            return None
        talk = self._conversations.get(route) or self._side_talk(route, envelope.sender)
        verdict = talk.judge(envelope)
        if verdict is Verdict.HELLO:
            return Incoming(envelope.sender, route, body_of(envelope), is_hello=True)
        if verdict is Verdict.ACCEPTED and talk.peer != 0:
            body = body_of(envelope)
            # Beside the route that said hello, a peer may only show that it lives.
            if self._routes[envelope.sender] == route or isinstance(body, Heartbeat | ExecutorHeartbeat):
                return Incoming(envelope.sender, route, body, is_hello=False)
        self.fenced += 1
        if verdict is not Verdict.DUPLICATE:
            self._send(route, Conversation(self._own, envelope.sender).seal(Fenced()))
        return None

    def _side_talk(self, route: bytes, sender: int) -> Conversation:
        """Return the conversation on a second route of a welcome peer; for a stranger one that accepts nothing."""
        if sender not in self._routes:
            return Conversation(self._own)
        talk = Conversation(self._own, sender)
        if sum(other.peer == sender for other in self._conversations.values()) < 2:
            self._conversations[route] = talk
        return talk

    def _send(self, route: bytes, frame: bytes) -> bool:
        try:
            self.socket.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True
