"""The buddy allocator against a model that is a list of slots."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memmgr.simulate.buddy import BuddyAllocator, rounded


class BuddyMachine(RuleBasedStateMachine):
    """An aligned run of free slots is found exactly where there is one: so free halves have always joined."""

    @initialize(total=st.integers(1, 100))
    def start(self, total: int) -> None:
        self.buddy = BuddyAllocator(total)
        self.fresh = sorted(self.buddy.free_runs())
        self.holder: list[int | None] = [None] * total  # slot -> start of the run that it is in
        self.runs: list[tuple[int, int]] = []

    @rule(slots=st.integers(1, 40))
    def allocate(self, slots: int) -> None:
        length = 1
        while length < slots:
            length *= 2
        assert rounded(slots) == length
        free = [
            start
            for start in range(0, len(self.holder) - length + 1, length)
            if all(holder is None for holder in self.holder[start : start + length])
        ]
        assert self.buddy.fits(slots) == bool(free)
        start = self.buddy.allocate(slots)
        if not free:
            assert start is None
            return
        assert start in free, "aligned, within the pool, and nobody else's"
        self.holder[start : start + length] = [start] * length
        self.runs.append((start, length))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        start, length = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        self.buddy.release(start)
        self.holder[start : start + length] = [None] * length

    @precondition(lambda self: self.runs)
    @rule()
    def release_all(self) -> None:
        for start, length in self.runs:
            self.buddy.release(start)
            self.holder[start : start + length] = [None] * length
        self.runs = []
        assert sorted(self.buddy.free_runs()) == self.fresh

    @invariant()
    def it_is_whole(self) -> None:
        self.buddy.check_invariants()
        assert self.buddy.free == self.holder.count(None)


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_pool_is_laid_out_as_powers_of_two() -> None:
    buddy = BuddyAllocator(981 * 16)
    assert [length for _, length in sorted(buddy.free_runs())] == [8192, 4096, 2048, 1024, 256, 64, 16]
    assert buddy.largest == 8192
    assert [buddy.allocate(2048) is not None for _ in range(8)] == [True] * 7 + [False], (
        "seven contexts of 2,048 fit, as in the paper"
    )


def test_the_shortest_run_that_will_do_is_split_from_its_start() -> None:
    buddy = BuddyAllocator(16 + 4)
    assert buddy.allocate(3) == 16, "not a part of the long one"
    assert buddy.allocate(3) == 0
    assert buddy.allocate(1) == 4
    assert buddy.allocate(8) == 8
    buddy.release(0)
    assert sorted(buddy.free_runs()) == [(0, 4), (5, 1), (6, 2)]
    buddy.release(4)
    assert sorted(buddy.free_runs()) == [(0, 8)]


def test_a_run_is_released_once() -> None:
    buddy = BuddyAllocator(8)
    assert buddy.allocate(2) == 0
    buddy.release(0)
    with pytest.raises(KeyError):
        buddy.release(0)
