"""The connecting side: it finds memmgr, keeps it, notices its loss, and hears nothing twice or from the wrong one."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS, HELLO_INTERVAL_SECONDS, PEER_TIMEOUT_SECONDS
from kilburn.v1.engine_pb2 import Cancel, Fenced, GatewayHello, Goodbye, Heartbeat, Welcome
from kilburn.wire.envelope import Conversation, body_of, parse
from kilburn.wire.link import Link

OWN, MEMMGR, LATER = 5, 7, 11
memmgrs = st.sampled_from([MEMMGR, LATER])


def linked(now: float = 0.0) -> tuple[Link, Conversation]:
    """Return a link that has just been welcomed, and memmgr's side."""
    link = Link(OWN, GatewayHello(protocol=1))
    assert link.due(now) is not None
    memmgr = Conversation(MEMMGR, OWN)
    assert link.read(memmgr.seal(Welcome()), now) is None
    assert link.connected
    return link, memmgr


def test_hellos_are_repeated_and_bounded_in_number() -> None:
    link = Link(OWN, GatewayHello(protocol=1))
    hellos = [frame for tick in range(100) if (frame := link.due(tick * HELLO_INTERVAL_SECONDS / 10))]
    assert len(hellos) == 10
    assert all(parse(frame).receiver == 0 for frame in hellos)
    assert not link.connected


def test_heartbeats_come_only_where_nothing_else_was_said() -> None:
    link, _ = linked(0.0)
    assert link.due(0.1) is None
    link.seal(Cancel(handle=1), 0.4)
    assert link.due(0.4 + HEARTBEAT_INTERVAL_SECONDS * 0.9) is None
    beat = link.due(0.4 + HEARTBEAT_INTERVAL_SECONDS)
    assert beat is not None
    assert isinstance(body_of(parse(beat)), Heartbeat)


def test_silence_is_a_loss_for_who_listens() -> None:
    link, _ = linked(0.0)
    tick = 0.1
    lost = next(n * tick for n in range(1, 100) if (link.due(n * tick), link.losses)[1])
    assert PEER_TIMEOUT_SECONDS < lost <= PEER_TIMEOUT_SECONDS + 2 * tick
    assert not link.connected
    assert link.losses == 1


def test_who_says_goodbye_has_left_until_it_is_there_again() -> None:
    link, memmgr = linked(0.0)
    assert link.read(memmgr.seal(Goodbye()), 0.1) is None
    assert (link.connected, link.left, link.losses) == (False, True, 1)
    assert link.due(0.2) is not None  # a hello
    assert link.read(Conversation(LATER, OWN).seal(Welcome()), 0.3) is None
    assert (link.connected, link.left) == (True, False)


def test_a_long_step_of_ones_own_is_no_silence_of_the_peer() -> None:
    link, _ = linked(0.0)
    link.due(0.1)
    link.due(60.0)
    assert link.connected


def test_the_attempt_tells_a_new_beginning_from_a_repeated_hello() -> None:
    link, memmgr = linked(0.0)
    link.read(memmgr.seal(Fenced()), 0.1)
    assert not link.connected
    frames = [link.due(1.0), link.due(1.0 + HELLO_INTERVAL_SECONDS)]
    attempts = [parse(frame).gateway_hello.attempt for frame in frames if frame]
    assert attempts == [1, 1]


def test_a_refusal_is_kept_and_connects_nobody() -> None:
    link = Link(OWN, GatewayHello(protocol=1))
    link.due(0.0)
    link.read(Conversation(MEMMGR, OWN).seal(Welcome(refusal="another version")), 0.0)
    assert link.refusal == "another version"
    assert not link.connected


def test_noise_is_counted_and_changes_nothing() -> None:
    link, memmgr = linked(0.0)
    stranger = Conversation(LATER, OWN)
    not_for_us = Conversation(MEMMGR, OWN + 1)
    again = memmgr.seal(Cancel(handle=1))
    assert link.read(again, 0.1) == Cancel(handle=1)
    for frame in (b"", b"\xff", stranger.seal(Cancel()), not_for_us.seal(Fenced()), stranger.seal(Welcome()), again):
        before = link.fenced
        assert link.read(frame, 0.1) is None
        assert link.fenced == before + 1
    assert link.peer == MEMMGR


class Talk(RuleBasedStateMachine):
    """A link and two memmgrs. As over ZeroMQ, what one of them says arrives in its order, late or never, and nothing twice."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.link = Link(OWN, GatewayHello(protocol=1))
        self.memmgrs = {incarnation: Conversation(incarnation, OWN) for incarnation in (MEMMGR, LATER)}
        self.flying: dict[int, list[bytes]] = {MEMMGR: [], LATER: []}
        self.sent = 0
        self.heard = {MEMMGR: 0, LATER: 0}
        self.losses = 0

    @rule(incarnation=memmgrs, anew=st.booleans())
    def welcome(self, incarnation: int, anew: bool) -> None:
        if anew:  # on another route: the numbers begin again
            self.memmgrs[incarnation] = Conversation(incarnation, OWN)
        self.flying[incarnation].append(self.memmgrs[incarnation].seal(Welcome()))

    @rule(incarnation=memmgrs)
    def say(self, incarnation: int) -> None:
        self.sent += 1
        self.flying[incarnation].append(self.memmgrs[incarnation].seal(Cancel(handle=self.sent)))

    @rule(incarnation=memmgrs)
    def fence(self, incarnation: int) -> None:
        self.flying[incarnation].append(Conversation(incarnation, OWN).seal(Fenced()))

    @rule(incarnation=memmgrs)
    def lose(self, incarnation: int) -> None:
        del self.flying[incarnation][:1]

    @rule(incarnation=memmgrs)
    def deliver(self, incarnation: int) -> None:
        if not self.flying[incarnation]:
            return
        peer = self.link.peer
        message = self.link.read(self.flying[incarnation].pop(0), self.now)
        if message is not None:
            assert peer == incarnation
            assert isinstance(message, Cancel)
            assert message.handle > self.heard[incarnation]
            self.heard[incarnation] = message.handle

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.4, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        frame = self.link.due(self.now)
        if frame is not None:
            envelope = parse(frame)
            assert envelope.receiver == self.link.peer
            assert isinstance(body_of(envelope), Heartbeat if self.link.connected else GatewayHello)

    @invariant()
    def losses_only_grow(self) -> None:
        if hasattr(self, "link"):
            assert self.link.losses >= self.losses
            self.losses = self.link.losses


TestTalk = Talk.TestCase
