"""The requests that live: by the key that names them for good, by the name that their client knows, and their deadlines.

Knows who lives; not where a request is (queues.py), what it holds or why it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from memmgr.schedule.plans import RequestKey
from memmgr.schedule.requests import Request


class Registry:
    """See the module. There are about `max_waiting` live requests at most that do not run."""

    __slots__ = ("_deadlines", "_max_waiting", "_names", "_requests")

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting: Final = max_waiting
        self._requests: dict[RequestKey, Request] = {}
        self._names: dict[tuple[str, str], Request] = {}  # (tenant, request id)
        self._deadlines: list[tuple[float, RequestKey]] = []  # a heap; entries of ended requests are skipped

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, key: RequestKey) -> Request | None:
        """Return a live request by its key."""
        return self._requests.get(key)

    def find(self, tenant: str, request_id: str) -> Request | None:
        """Return a live request by the name that its client knows it by."""
        return self._names.get((tenant, request_id))

    def add(self, request: Request) -> None:
        """Take note of a request that begins to live; neither its key nor its name is another's."""
        submission = request.submission
        self._requests[submission.key] = request
        self._names[submission.tenant, submission.request_id] = request
        if submission.deadline != float("inf"):
            heappush(self._deadlines, (submission.deadline, submission.key))

    def remove(self, request: Request) -> None:
        """Take note that a request has ended."""
        submission = request.submission
        del self._requests[submission.key]
        del self._names[submission.tenant, submission.request_id]

    def take_expired(self, now: float) -> list[RequestKey]:
        """Return the keys whose deadline has passed, each once; some of them have ended before."""
        expired: list[RequestKey] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            expired.append(heappop(self._deadlines)[1])
        if len(self._deadlines) > 2 * (len(self._requests) + self._max_waiting):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapify(self._deadlines)
        return expired

    def check_invariants(self) -> int:
        """Check that keys and names are of the same requests. Returns how many checks were made.

        Raises:
            AssertionError: they are not.
        """
        assert {(one.submission.tenant, one.submission.request_id) for one in self} == set(self._names)
        return 1
