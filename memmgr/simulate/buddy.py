"""A buddy allocator: runs of contiguous slots, each a power of two long and aligned to its length (Knowlton 1965; Knuth 2.5).

A free run is split in halves until it is as short as may be; two free halves of the same run join again at once. A number of
slots that is no power of two is laid out as the powers that it is made of, the longest first: 15,696 = 8,192 + 4,096 + 2,048 +
1,024 + 256 + 64 + 16. Each is aligned to its length there, and none has a buddy within the pool, so that they never join.

Knows slots; not what lies in them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final


class BuddyAllocator:
    """`total` slots. Of the runs that would do it takes the shortest, of those the first."""

    def __init__(self, total: int) -> None:
        assert total >= 1
        self.total: Final = total
        self.free = total
        self._runs: Final[dict[int, int]] = {}  # start of a run in use -> its order
        self._starts: Final[list[list[int]]] = [[] for _ in range(total.bit_length())]  # order -> starts of free runs, ascending
        start = 0
        for order in reversed(range(total.bit_length())):
            if total >> order & 1:
                self._starts[order].append(start)
                start += 1 << order

    @property
    def largest(self) -> int:
        """The longest run that could ever be given out."""
        return 1 << self.total.bit_length() - 1

    def fits(self, slots: int) -> bool:
        """Whether so many slots could be given out now."""
        return any(self._starts[_order(slots) :])

    def allocate(self, slots: int) -> int | None:
        """Give out a run that holds so many slots: return where it starts, or None where no run is long enough."""
        wanted = _order(slots)
        order = next((order for order in range(wanted, len(self._starts)) if self._starts[order]), None)
        if order is None:
            return None
        start = self._starts[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._starts[order], start + (1 << order))
        self._runs[start] = wanted
        self.free -= 1 << wanted
        return start

    def release(self, start: int) -> None:
        """Take a run back, by where it starts."""
        order = self._runs.pop(start)
        self.free += 1 << order
        while (place := self._find(order, start ^ 1 << order)) is not None:
            del self._starts[order][place]
            start &= ~(1 << order)
            order += 1
        insort(self._starts[order], start)

    def free_runs(self) -> list[tuple[int, int]]:
        """Return (start, length) of the free runs, in no order."""
        return [(start, 1 << order) for order, starts in enumerate(self._starts) for start in starts]

    def _find(self, order: int, start: int) -> int | None:
        starts = self._starts[order]
        place = bisect_left(starts, start)
        return place if place < len(starts) and starts[place] == start else None

    def check_invariants(self) -> int:
        """Check that free runs and runs in use fill the slots exactly, are aligned, and that no two buddies are free.

        Raises:
            AssertionError: one does not hold.
        """
        used = [(start, 1 << order) for start, order in self._runs.items()]
        free = self.free_runs()
        end = 0
        for start, length in sorted(used + free):
            assert start == end, f"slots {end} .. {start - 1} are in no run, or in two"
            assert start % length == 0, f"the run at {start} is not aligned to its {length} slots"
            end = start + length
        assert end == self.total
        assert sum(length for _, length in free) == self.free
        for start, length in free:
            assert (start ^ length, length) not in free, f"two free buddies at {start} have not joined"
        return 2 * len(used) + 3 * len(free) + 2


def rounded(slots: int) -> int:
    """Return how long the run is that holds so many slots."""
    return 1 << _order(slots)


def _order(slots: int) -> int:
    assert slots >= 1
    return (slots - 1).bit_length()
