"""Envelopes and fencing: what is accepted, and what no frame can do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import WireError
from kilburn.limits import MAX_FRAME_BYTES
from kilburn.v1.engine_pb2 import Cancel, Envelope, GatewayHello, Heartbeat
from kilburn.wire.envelope import Conversation, Verdict, body_of, new_incarnation, parse

incarnations = st.integers(1, 2**64 - 1)


@given(incarnations, incarnations, st.integers(0, 2**64 - 1))
def test_what_is_sealed_is_read(one: int, other: int, handle: int) -> None:
    envelope = parse(Conversation(one, other).seal(Cancel(handle=handle)))
    assert (envelope.sender, envelope.receiver, envelope.sequence) == (one, other, 1)
    assert body_of(envelope) == Cancel(handle=handle)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_envelope_or_a_wire_error(frame: bytes) -> None:
    try:
        envelope = parse(frame)
    except WireError:
        return
    assert envelope.sender
    body_of(envelope)


@pytest.mark.parametrize(
    "envelope", [Envelope(), Envelope(sender=1), Envelope(heartbeat=Heartbeat()), Envelope(sender=0, cancel=Cancel(handle=1))]
)
def test_an_envelope_needs_a_sender_and_a_body(envelope: Envelope) -> None:
    with pytest.raises(WireError):
        parse(envelope.SerializeToString())


def test_a_frame_that_is_too_long_is_not_even_parsed() -> None:
    with pytest.raises(WireError, match="at most"):
        parse(bytes(MAX_FRAME_BYTES + 1))


def test_a_body_of_a_later_version_is_refused() -> None:
    frame = Envelope(sender=1, receiver=2, sequence=1).SerializeToString() + b"\xfa\x07\x00"  # field 127, empty
    with pytest.raises(WireError, match="without a body"):
        parse(frame)


def test_incarnations_are_never_zero_and_differ() -> None:
    found = {new_incarnation() for _ in range(100)}
    assert len(found) == 100
    assert all(0 < incarnation < 2**64 for incarnation in found)


def test_a_hello_is_for_nobody() -> None:
    frame = Conversation(7).seal(GatewayHello())
    assert Conversation(9).judge(parse(frame)) is Verdict.HELLO
    assert Conversation(9, 7).judge(parse(frame)) is Verdict.HELLO


@given(st.data())
def test_each_message_is_accepted_at_most_once_in_order_and_only_between_the_two(data: st.DataObject) -> None:
    """Frames of two talks are delivered in any order, any number of times, to anyone."""
    talks = {(sender, receiver): Conversation(sender, receiver) for sender in (1, 3) for receiver in (2, 4)}
    frames = [talks[pair].seal(Cancel(handle=n)) for n in range(4) for pair in talks]
    reader = Conversation(2, 1)
    accepted: list[int] = []
    for number in data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=40)):
        envelope = parse(frames[number])
        verdict = reader.judge(envelope)
        if (envelope.sender, envelope.receiver) != (1, 2):
            assert verdict is Verdict.FENCED
        elif verdict is Verdict.ACCEPTED:
            accepted.append(envelope.cancel.handle)
        else:
            assert verdict is Verdict.DUPLICATE
    assert accepted == sorted(set(accepted))


def test_a_new_peer_begins_at_one_and_the_old_one_is_fenced() -> None:
    old, new = Conversation(1, 9), Conversation(2, 9)
    reader = Conversation(9)
    reader.meet(1)
    for _ in range(3):
        assert reader.judge(parse(old.seal(Heartbeat()))) is Verdict.ACCEPTED
    reader.meet(2)
    assert reader.judge(parse(new.seal(Heartbeat()))) is Verdict.ACCEPTED
    assert reader.judge(parse(old.seal(Heartbeat()))) is Verdict.FENCED
    reader.forget()
    assert reader.peer == 0
