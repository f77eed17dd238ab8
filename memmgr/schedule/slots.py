"""The executor's slots: which are free, and which it has yet to be told are closed."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final


class Slots:
    """Slots 0 .. total - 1; the lowest free one is given out first. A plan closes slots before it opens any."""

    def __init__(self, total: int) -> None:
        self.total: Final = total
        self._free: list[int] = list(range(total))  # a heap
        self._closed: list[int] = []  # given up since the last plan

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    @property
    def closing(self) -> frozenset[int]:
        """Those given up since the last plan: the executor does not know of it yet."""
        return frozenset(self._closed)

    @property
    def any_closing(self) -> bool:
        """Whether the next plan has slots to close."""
        return bool(self._closed)

    def take(self) -> int:
        """Return a slot that is free no more."""
        return heappop(self._free)

    def give_up(self, slot: int) -> None:
        """Free a slot; the next plan closes it."""
        heappush(self._free, slot)
        self._closed.append(slot)

    def closes(self) -> tuple[int, ...]:
        """Return what the next plan closes, and forget it."""
        closed, self._closed = tuple(self._closed), []
        return closed

    def forget_closing(self) -> None:
        """The executor is gone: there is nobody to tell."""
        self._closed.clear()

    def check_invariants(self, taken: list[int]) -> int:
        """Check that the taken slots, in any order, and the free ones are all. Returns how many checks were made.

        Raises:
            AssertionError: they are not.
        """
        assert sorted(taken + self._free) == list(range(self.total)), "slots do not add up"
        return 1 + self.total
