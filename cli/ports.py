"""TCP ports that are kept for services that are still to be started, or to be started again.

A port is kept by a socket that is bound and does not listen: the kernel gives it to nobody who asks for any port, and lets a
server that allows the reuse of addresses, as gRPC's do, listen on it. So a service that was killed comes back on its port, port 0
included. Knows nothing of who listens.
"""

import errno
import socket
from dataclasses import replace
from types import TracebackType
from typing import Self

from kilburn.config import Address
from kilburn.errors import StartError


class KeptPorts:
    """The ports of one instance; given back at the end of the block."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for kept in self._sockets:
            kept.close()

    def keep(self, address: Address, flag: str) -> Address:
        """Return the address with a port that is ours; port 0 becomes a free one.

        Raises:
            StartError: somebody listens there, or this machine has no such address. `flag` names it in the message.
        """
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            kept = socket.socket(family, kind, protocol)
            self._sockets.append(kept)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"{flag} {address}: the port is in use; name another, or port 0 for a free one") from error
            raise StartError(f"{flag} {address}: can't listen there: {error.strerror}") from error
        return replace(address, port=kept.getsockname()[1])
