"""Envelopes and fencing: pure, no sockets.

A process is known by its **incarnation**, a random non-zero 64-bit number chosen at its start, so that a restarted process is
never mistaken for the one that died. A `Conversation` is one side of the talk between two incarnations over one socket: it
seals what goes out and judges what comes in.

    verdict     the message is                                  what the reader does
    ACCEPTED    from the known peer, for this incarnation, new   acts on it
    HELLO       for nobody in particular (receiver 0)            may welcome the sender
    FENCED      for or from another incarnation                  drops it, counts it, answers Fenced
    DUPLICATE   at or below the last sequence number seen        drops it, counts it
"""

import enum
import secrets
from typing import Final

from google.protobuf.message import DecodeError, Message

from kilburn.errors import WireError
from kilburn.limits import MAX_FRAME_BYTES
from kilburn.v1.engine_pb2 import Envelope

_FIELD_OF_BODY: Final[dict[str, str]] = {
    field.message_type.full_name: field.name
    for field in Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    if field.message_type is not None
}


class Verdict(enum.Enum):
    """What a conversation makes of an envelope; see the module's table."""

    ACCEPTED = "accepted"
    HELLO = "hello"
    FENCED = "fenced"
    DUPLICATE = "duplicate"


def new_incarnation() -> int:
    """Return a random number in 1 .. 2**64 - 1."""
    return secrets.randbelow(2**64 - 1) + 1


def parse(frame: bytes) -> Envelope:
    """Read one frame.

    Raises:
        WireError: the frame is too long, is no Envelope, has no sender, or has no body that this version knows.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        envelope = Envelope.FromString(frame)
    except DecodeError as error:
        raise WireError("a frame that is no Envelope") from error
    if envelope.sender == 0:
        raise WireError("an envelope without a sender")
    if envelope.WhichOneof("body") is None:
        raise WireError("an envelope without a body of this version")
    return envelope


def body_of(envelope: Envelope) -> Message:
    """Return the message inside a parsed envelope."""
    field = envelope.WhichOneof("body")
    assert field is not None, "parse() lets no envelope without a body through"
    body: Message = getattr(envelope, field)
    return body


class Conversation:
    """One side of the talk with one peer over one socket.

    `peer` is the peer's incarnation, 0 while unknown. A hello is sealed while it is 0; `meet` sets it.
    """

    __slots__ = ("_seen", "_sent", "own", "peer")

    def __init__(self, own: int, peer: int = 0) -> None:
        assert own != 0
        self.own = own
        self.peer = peer
        self._sent = 0
        self._seen = 0

    def meet(self, peer: int) -> None:
        """Speak from now on with `peer`. Numbers seen from an earlier peer are forgotten; ours go on growing."""
        if peer != self.peer:
            self.peer = peer
            self._seen = 0

    def forget(self) -> None:
        """Speak with nobody: only hellos are sealed until `meet`."""
        self.meet(0)

    def seal(self, body: Message) -> bytes:
        """Return the frame that carries `body` to the peer."""
        self._sent += 1
        envelope = Envelope(sender=self.own, receiver=self.peer, sequence=self._sent)
        getattr(envelope, _FIELD_OF_BODY[body.DESCRIPTOR.full_name]).CopyFrom(body)
        frame = envelope.SerializeToString()
        assert len(frame) <= MAX_FRAME_BYTES, f"{body.DESCRIPTOR.name} of {len(frame)} bytes: its producer must bound it"
        return frame

    def judge(self, envelope: Envelope) -> Verdict:
        """Say what to do with an envelope, and remember its number if it is accepted."""
        if envelope.receiver == 0:
            return Verdict.HELLO
        if envelope.receiver != self.own or (self.peer != 0 and envelope.sender != self.peer):
            return Verdict.FENCED
        if envelope.sequence <= self._seen:
            return Verdict.DUPLICATE
        self._seen = envelope.sequence
        return Verdict.ACCEPTED
