"""The connecting side's state machine: how a gateway or an executor finds memmgr, keeps it, and notices its loss.

Pure: frames and the time come in, frames and messages go out. The owner moves frames between this and its socket.

    state      on                                    becomes
    SEEKING    Welcome without refusal               CONNECTED to its sender
    SEEKING    Welcome with refusal                  SEEKING, `refusal` set: the owner ends
    CONNECTED  Fenced by the peer or its successor   SEEKING
    CONNECTED  silence of PEER_TIMEOUT_SECONDS       SEEKING

SEEKING sends a hello every HELLO_INTERVAL_SECONDS, to whoever binds the endpoint; CONNECTED sends a heartbeat where nothing
else was sent for HEARTBEAT_INTERVAL_SECONDS. `losses` counts the ways out of CONNECTED, so that an owner that remembers it
sees a loss even where the next Welcome came at once.
"""

from google.protobuf.message import Message

from kilburn.errors import WireError
from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS, HELLO_INTERVAL_SECONDS, PEER_TIMEOUT_SECONDS
from kilburn.v1.engine_pb2 import ExecutorHello, Fenced, GatewayHello, Goodbye, Heartbeat, Welcome
from kilburn.wire.envelope import Conversation, Verdict, body_of, parse

_NEVER = float("-inf")


class Link:
    """See the module. Times are seconds of one monotonic clock.

    In each hello `attempt` is `losses`, so that memmgr tells a hello repeated from a peer that has lost it and begins anew.
    """

    def __init__(self, own: int, hello: GatewayHello | ExecutorHello) -> None:
        self.refusal = ""
        self.fenced = 0
        self.losses = 0
        self.left = False  # memmgr has said that it stops, and was not found again since
        self._conversation = Conversation(own)
        self._hello = hello
        self._heard = _NEVER
        self._spoke = _NEVER
        self._looked = _NEVER

    @property
    def connected(self) -> bool:
        """Whether memmgr has welcomed us and was not lost since."""
        return self._conversation.peer != 0

    @property
    def peer(self) -> int:
        """memmgr's incarnation; 0 while seeking."""
        return self._conversation.peer

    def seal(self, body: Message, now: float) -> bytes:
        """Return the frame for a message to the peer that we are connected to."""
        assert self.connected
        self._spoke = now
        return self._conversation.seal(body)

    def due(self, now: float) -> bytes | None:
        """Return the hello or heartbeat that is due, if one is.

        Silence is judged here, and only by who listens: where the owner itself was away (a long step, a stopped process), what
        the peer said meanwhile may still lie in the socket, and the count begins anew.
        """
        if now - self._looked > HEARTBEAT_INTERVAL_SECONDS:
            self._heard = now
        self._looked = now
        if self.connected and now - self._heard > PEER_TIMEOUT_SECONDS:
            self._lose()
        if self.connected:
            if now - self._spoke < HEARTBEAT_INTERVAL_SECONDS:
                return None
            return self.seal(Heartbeat(), now)
        if now - self._spoke < HELLO_INTERVAL_SECONDS:
            return None
        self._spoke = now
        self._hello.attempt = self.losses
        return self._conversation.seal(self._hello)

    def read(self, frame: bytes, now: float) -> Message | None:
        """Take in one frame; return the message that the owner must act on, if it is one.

        Welcome, Fenced, Goodbye and Heartbeat are dealt with here and not returned.
        """
        try:
            envelope = parse(frame)
        except WireError:
            self.fenced += 1
            return None
        body = body_of(envelope)
        if isinstance(body, Fenced) and envelope.receiver == self._conversation.own:
            self._lose()
            return None
        if not self.connected and not isinstance(body, Welcome):
            self.fenced += 1
            return None
        if self._conversation.judge(envelope) is not Verdict.ACCEPTED:
            self.fenced += 1
            return None
        self._heard = now
        if isinstance(body, Goodbye):
            self._lose()
            self.left = True
            return None
        if isinstance(body, Welcome):
            self.refusal = body.refusal
            if not body.refusal:
                self._conversation.meet(envelope.sender)
                self.left = False
            return None
        return None if isinstance(body, Heartbeat) else body

    def _lose(self) -> None:
        if self.connected:
            self.losses += 1
            self._conversation.forget()
            self._spoke = _NEVER
