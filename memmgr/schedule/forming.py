"""Prefixes that are being computed right now, and who waits for them, so that none is computed twice.

A request whose prompt goes on, after what the cache holds of it, with a whole block that an admitted sequence is computing, waits
for it: its leader. It waits only for admitted sequences, which never wait themselves, so nobody waits in a circle; it holds
nothing meanwhile, and others may pass it. It waits for the last block of the run that it shares, once. Where the leader goes
before that block is there (preempted, cancelled, failed), it is free again: the first of those who waited leads.
"""

from __future__ import annotations

from array import array
from typing import Final

from memmgr.core.lineage import Lineage
from memmgr.schedule.requests import Request, Sequence


class FormingPrefixes:
    """The whole blocks of known tokens that admitted sequences have to compute, by name, and the requests that wait for one."""

    __slots__ = ("_block_size", "_followers", "_leaders", "_names", "_waits_for")

    def __init__(self, block_size: int) -> None:
        self._block_size: Final = block_size
        self._leaders: dict[bytes, Sequence] = {}
        self._names: dict[Sequence, list[tuple[int, bytes]]] = {}  # of a leader: (logical, name), the last block first
        self._followers: dict[bytes, list[Request]] = {}
        self._waits_for: dict[Request, bytes] = {}

    def __len__(self) -> int:
        """Return how many blocks are being computed."""
        return len(self._leaders)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Those who wait."""
        return tuple(self._waits_for)

    def lead(self, sequence: Sequence, tokens: array[int], cached_blocks: int) -> None:
        """Take note that a sequence computes the blocks of `tokens` from `cached_blocks` on; of equal ones the first counts."""
        names: list[tuple[int, bytes]] = []
        for logical in range(cached_blocks, len(tokens) // self._block_size):
            name = self._name(sequence.lineage, tokens, logical)
            if name not in self._leaders:
                self._leaders[name] = sequence
                names.append((logical, name))
        if names:
            names.reverse()
            self._names[sequence] = names

    def leads(self, sequence: Sequence) -> bool:
        """Return whether a sequence is computing a block that others could wait for."""
        return sequence in self._names

    def follow(self, request: Request, lineage: Lineage, tokens: array[int], cached_blocks: int) -> Sequence | None:
        """Let a request wait that needs `tokens`; return its leader. None: nobody computes the first block that the cache lacks.

        The last token of a prompt is computed in any case, so a block that holds it is of no use to it.
        """
        awaited: bytes | None = None
        for logical in range(cached_blocks, (len(tokens) - 1) // self._block_size):
            name = self._name(lineage, tokens, logical)
            if name not in self._leaders:
                break
            awaited = name
        if awaited is None:
            return None
        self._waits_for[request] = awaited
        self._followers.setdefault(awaited, []).append(request)
        return self._leaders[awaited]

    def is_waiting(self, request: Request) -> bool:
        """Return whether a request waits for a leader."""
        return request in self._waits_for

    def forget(self, request: Request) -> None:
        """Take out a request that has ended while it waited."""
        name = self._waits_for.pop(request)
        followers = self._followers[name]
        followers.remove(request)
        if not followers:
            del self._followers[name]

    def arrived(self, leader: Sequence, blocks: int) -> list[Request]:
        """Take note that a leader's first `blocks` blocks are in the pool; return those who need not wait any more."""
        names = self._names[leader]
        freed: list[Request] = []
        while names and names[-1][0] < blocks:
            freed += self._release(names.pop()[1])
        if not names:
            del self._names[leader]
        return freed

    def leave(self, leader: Sequence) -> list[Request]:
        """Take note that a leader computes no more; return those who waited for what it had not computed yet."""
        return [request for _, name in reversed(self._names.pop(leader)) for request in self._release(name)]

    def _release(self, name: bytes) -> list[Request]:
        del self._leaders[name]
        followers = self._followers.pop(name, [])
        for request in followers:
            del self._waits_for[request]
        return followers

    def _name(self, lineage: Lineage, tokens: array[int], logical: int) -> bytes:
        size = self._block_size
        return lineage.name(logical, tokens[logical * size : (logical + 1) * size].tobytes())

    def check_invariants(self) -> int:
        """Check that leaders and followers agree. Returns how many checks were made.

        Raises:
            AssertionError: they do not.
        """
        led = {name: leader for leader, names in self._names.items() for _, name in names}
        assert led == self._leaders, "a block has no leader, or a leader no block"
        assert all(self._names.values()), "a leader of nothing"
        assert self._followers.keys() <= self._leaders.keys(), "a request waits for what nobody computes"
        assert {request: name for name, requests in self._followers.items() for request in requests} == self._waits_for
        assert not {leader.request for leader in self._names} & self._waits_for.keys(), "a leader waits"
        return len(led) + len(self._waits_for) + 4
