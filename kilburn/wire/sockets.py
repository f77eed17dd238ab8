"""How every ZeroMQ socket of ours is set up: what ZeroMQ leaves unlimited or silent by default is limited and said here."""

from typing import Any, Final, TypeVar

import zmq

from kilburn.errors import StartError
from kilburn.limits import MAX_FRAME_BYTES, MAX_QUEUED_FRAMES

SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")

#: How long a closing process waits for its last frames to leave, in milliseconds.
_LINGER_MS: Final = 500

#: ZeroMQ's own heartbeats find a connection that broke without a word (tcp); ours find a process that froze.
_HEARTBEAT_INTERVAL_MS: Final = 1000
_HEARTBEAT_TIMEOUT_MS: Final = 3000

_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 500


def _set_up(socket: SocketT) -> SocketT:
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
    return socket


def router(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """Return a ROUTER bound to `endpoint`, which reports unreachable peers and lets a peer come back under its name.

    Raises:
        StartError: the endpoint can't be bound.
    """
    socket = _set_up(context.socket(zmq.ROUTER))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise StartError(f"can't bind {endpoint}: {error.strerror}") from error
    return socket


def dealer(socket: SocketT, endpoint: str) -> SocketT:
    """Set up a fresh DEALER socket (plain or asyncio) and connect it; nothing is queued while nobody is there.

    Raises:
        StartError: the endpoint is malformed.
    """
    _set_up(socket)
    # Without this, hellos pile up while memmgr is away and all arrive at its return.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise StartError(f"can't connect to {endpoint}: {error.strerror}") from error
    return socket
