"""memmgr's ROUTER and the peers that connect, over a real ipc socket."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from kilburn.errors import StartError
from kilburn.v1.engine_pb2 import Cancel, Envelope, ExecutorHeartbeat, ExecutorHello, GatewayHello, Heartbeat, TokenBatch, Welcome
from kilburn.wire.envelope import Conversation, body_of, parse
from kilburn.wire.hub import Hub, Incoming
from kilburn.wire.link import Link
from kilburn.wire.sockets import dealer

Context = zmq.Context[zmq.Socket[bytes]]
Found = TypeVar("Found")
MEMMGR = 7


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/hub.sock"


@pytest.fixture
def hub(context: Context, endpoint: str) -> Iterator[Hub]:
    hub = Hub(context, endpoint, MEMMGR)
    yield hub
    hub.close()


class Peer:
    """A link with its socket, moved by hand."""

    def __init__(self, context: Context, endpoint: str, own: int) -> None:
        self.link = Link(own, GatewayHello(protocol=1))
        self.socket = dealer(context.socket(zmq.DEALER), endpoint)

    def turn(self) -> list[object]:
        """Send what is due and return what has arrived."""
        found: list[object] = []
        while True:
            try:
                message = self.link.read(self.socket.recv(zmq.NOBLOCK), time.monotonic())
            except zmq.Again:
                break
            if message is not None:
                found.append(message)
        frame = self.link.due(time.monotonic())
        if frame is not None:
            try:
                self.socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return found  # nobody is there
        return found

    def say(self, handle: int) -> None:
        self.socket.send(self.link.seal(Cancel(handle=handle), time.monotonic()))


def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(0.002)


def drained(hub: Hub) -> list[Incoming]:
    """Take in what has come; welcome every hello."""
    found = list(hub.drain())
    for incoming in found:
        if incoming.is_hello:
            hub.welcome(incoming)
    return [incoming for incoming in found if not incoming.is_hello]


def gather(source: Callable[[], Iterable[Found]], count: int) -> list[Found]:
    """Return what a source brings, once it is so many."""
    found: list[Found] = []

    def enough() -> bool:
        found.extend(source())
        return len(found) >= count

    until(enough)
    assert len(found) == count
    return found


def connect(hub: Hub, peer: Peer) -> None:
    until(lambda: (peer.turn(), drained(hub), peer.link.connected)[2])


def test_both_sides_hear_each_other_in_order(context: Context, endpoint: str, hub: Hub) -> None:
    peer = Peer(context, endpoint, 1)
    connect(hub, peer)
    assert hub.peers == {1}
    for handle in range(20):
        peer.say(handle)
        assert hub.send(1, Cancel(handle=handle))
    said = gather(peer.turn, 20)
    heard = gather(lambda: [incoming.body for incoming in drained(hub) if isinstance(incoming.body, Cancel)], 20)
    assert said == heard == [Cancel(handle=handle) for handle in range(20)]
    peer.socket.close(0)


def test_a_restarted_memmgr_is_noticed_and_met_again(context: Context, endpoint: str) -> None:
    first = Hub(context, endpoint, MEMMGR)
    peer = Peer(context, endpoint, 1)
    connect(first, peer)
    first.close()
    second = Hub(context, endpoint, MEMMGR + 1)
    until(lambda: (peer.turn(), drained(second), peer.link.peer == MEMMGR + 1)[2], 10)
    assert peer.link.losses == 1
    assert second.peers == {1}
    peer.socket.close(0)
    second.close()


def test_who_was_dropped_is_fenced_until_it_says_hello_again(context: Context, endpoint: str, hub: Hub) -> None:
    peer = Peer(context, endpoint, 1)
    connect(hub, peer)
    hub.drop(1)
    peer.say(1)
    until(lambda: (drained(hub), hub.fenced)[1])
    until(lambda: (peer.turn(), peer.link.losses)[1])
    connect(hub, peer)
    assert hub.peers == {1}
    peer.socket.close(0)


def test_a_peer_that_has_gone_is_found_out_by_sending(context: Context, endpoint: str, hub: Hub) -> None:
    peer = Peer(context, endpoint, 1)
    connect(hub, peer)
    peer.socket.close(0)
    until(lambda: not hub.peers or not hub.send(1, Heartbeat()))
    assert hub.peers == frozenset()


def test_a_hello_repeated_is_welcomed_again_with_numbers_that_go_on(context: Context, endpoint: str, hub: Hub) -> None:
    socket = dealer(context.socket(zmq.DEALER), endpoint)
    talk = Conversation(1)
    for _ in range(2):
        socket.send(talk.seal(GatewayHello(protocol=1)))
    found = gather(hub.drain, 2)
    assert all(incoming.is_hello and hub.welcome(incoming) for incoming in found)
    envelopes = [parse(socket.recv()) for _ in range(2)]
    assert [envelope.sequence for envelope in envelopes] == [1, 2]
    assert all(isinstance(body_of(envelope), Welcome) for envelope in envelopes)
    socket.close(0)


def test_a_refusal_reaches_the_peer(context: Context, endpoint: str, hub: Hub) -> None:
    peer = Peer(context, endpoint, 1)
    until(lambda: (peer.turn(), hub.socket.poll(0))[1])
    found = gather(hub.drain, 1)
    assert hub.refuse(found[0], "another version") is False
    until(lambda: (peer.turn(), peer.link.refusal)[1])
    assert not hub.peers
    peer.socket.close(0)


def test_an_executor_may_send_its_heartbeats_on_a_second_route_and_no_third(context: Context, endpoint: str, hub: Hub) -> None:
    main, *others = [dealer(context.socket(zmq.DEALER), endpoint) for _ in range(3)]
    main.send(Conversation(1).seal(ExecutorHello(protocol=1)))
    until(lambda: (drained(hub), hub.peers)[1])
    others[0].send(Conversation(1, MEMMGR).seal(ExecutorHeartbeat(step=3)))
    found = gather(lambda: drained(hub), 1)
    assert (found[0].incarnation, found[0].body) == (1, ExecutorHeartbeat(step=3))
    # A third route is heard, but not remembered: nothing grows with the number of routes.
    others[1].send(Conversation(1, MEMMGR).seal(ExecutorHeartbeat(step=4)))
    assert gather(lambda: drained(hub), 1)[0].body == ExecutorHeartbeat(step=4)
    hub.drop(1)
    for other in (main, *others):
        other.close(0)


def test_nothing_but_heartbeats_counts_on_a_second_route(context: Context, endpoint: str, hub: Hub) -> None:
    main, other = [dealer(context.socket(zmq.DEALER), endpoint) for _ in range(2)]
    main.send(Conversation(1).seal(GatewayHello(protocol=1)))
    until(lambda: (drained(hub), hub.peers)[1])
    beside = Conversation(1, MEMMGR)
    other.send(beside.seal(Cancel(handle=1)))
    other.send(beside.seal(Heartbeat()))
    assert gather(lambda: drained(hub), 1)[0].body == Heartbeat()
    assert hub.fenced == 1
    assert hub.peers == {1}
    for socket in (main, other):
        socket.close(0)


def test_strangers_and_noise_are_dropped_and_counted(context: Context, endpoint: str, hub: Hub) -> None:
    socket = dealer(context.socket(zmq.DEALER), endpoint)
    frames = [
        [b"no envelope"],
        [b"", b""],
        [Envelope(sender=1, receiver=MEMMGR, sequence=1).SerializeToString()],
        [Conversation(1, MEMMGR).seal(TokenBatch())],
        [Conversation(1, MEMMGR + 1).seal(Heartbeat())],
    ]
    for frame in frames:
        socket.send_multipart(frame)
    until(lambda: (drained(hub), hub.fenced == len(frames))[1])
    assert not hub.peers
    socket.close(0)


def test_there_is_a_limit_to_the_peers(context: Context, endpoint: str, hub: Hub) -> None:
    socket = dealer(context.socket(zmq.DEALER), endpoint)
    for own in range(1, 70):
        socket.send(Conversation(own).seal(GatewayHello(protocol=1)))
    gather(lambda: [hub.welcome(incoming) for incoming in hub.drain()], 69)
    assert len(hub.peers) <= 64
    socket.close(0)


def test_a_flood_does_not_keep_the_owner_from_its_steps(context: Context, endpoint: str, hub: Hub) -> None:
    socket = dealer(context.socket(zmq.DEALER), endpoint)
    for _ in range(600):
        socket.send(b"noise")
    until(lambda: hub.socket.poll(0))
    time.sleep(0.2)
    assert list(hub.drain()) == []
    assert 0 < hub.fenced <= 256
    socket.close(0)


def test_an_endpoint_that_can_not_be_bound(context: Context, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't bind"):
        Hub(context, f"ipc://{tmp_path}/no/such/folder.sock", MEMMGR)


def test_the_path_goes_with_the_hub(context: Context, tmp_path: Path) -> None:
    Hub(context, f"ipc://{tmp_path}/x.sock", MEMMGR).close()
    assert not list(tmp_path.iterdir())


def test_a_connection_is_one_peers_at_a_time(context: Context, endpoint: str, hub: Hub) -> None:
    socket = dealer(context.socket(zmq.DEALER), endpoint)
    for incarnation in 1, 2:
        socket.send(Conversation(incarnation).seal(GatewayHello(protocol=1)))
    first, second = gather(hub.drain, 2)
    assert hub.welcome(first)
    assert not hub.welcome(second)
    assert hub.peers == {1}
    assert hub.send(1, Heartbeat())
    bodies = [body_of(parse(socket.recv())) for _ in range(3)]
    assert [body.refusal for body in bodies[:2] if isinstance(body, Welcome)] == ["", "this connection is another peer's"]
    hub.drop(1)
    assert hub.welcome(second)
    assert hub.peers == {2}
    socket.close(0)
