"""Every string of operations on the small world, breadth first, every operation that is allowed at every point.

Two strings that lead to the same state (`World.signature`) go on in the same way, so only one is followed; how many strings there
are is counted all the same. A test compares this with a search that follows every string.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.memmgr.memmgr_small_world import Operation, Signature, World, again, begin, check_attributes, kept


@dataclass(slots=True)
class Found:
    """What a search has seen, by the number of operations where it is a list."""

    states: list[int] = field(default_factory=lambda: [1])  # new ones
    strings: list[int] = field(default_factory=lambda: [1])  # all, of exactly so many operations
    transitions: int = 0
    reached: Counter[str] = field(default_factory=Counter)  # how many transitions did what
    signatures: set[Signature] = field(default_factory=set)


class BrokenError(AssertionError):
    """The memory does wrong after these operations."""


def search(
    depth: int, start: tuple[Operation, ...] = (), *, prune: bool = True, progress: Callable[[Found], None] | None = None
) -> Found:
    """Try all strings of up to `depth` operations that go on from `start`. Where it does not `prune`, each string by itself.

    Raises:
        BrokenError: with the shortest string that shows the fault.
    """
    world = begin(start)
    check_attributes()
    found = Found()
    seen = {world.signature(): 0}
    came_from: list[tuple[int, Operation | None]] = [(0, None)]  # state -> the string that led to it first
    ways: list[list[int]] = [[]]  # state -> the states that one operation leads to
    frontier = [(0, kept(world))]
    for length in range(1, depth + 1):
        reached: list[tuple[int, bytes]] = []
        new = 0
        for number, before in frontier:
            world = again(before)
            for operation in list(world.operations()):
                after = again(before)
                try:
                    if not after.apply(operation):
                        continue
                    found.transitions += 1
                    _note(found.reached, operation, world, after)
                    signature = after.signature()
                    target = seen.get(signature)
                    if target is None or not prune:
                        after.check()
                except AssertionError as error:
                    raise BrokenError(f"{error}: {[*start, *_string(came_from, number), operation]}") from error
                if target is None or not prune:
                    target = len(came_from)
                    seen[signature] = target
                    came_from.append((number, operation))
                    ways.append([])
                    new += 1
                    if length < depth:
                        reached.append((target, kept(after)))
                    else:
                        _check_leaks(after, start, came_from, target)
                ways[number].append(target)
            _check_leaks(world, start, came_from, number)
        found.states.append(new)
        frontier = reached
        if progress is not None:
            progress(found)
    found.strings = _count_strings(ways, depth)
    found.signatures = set(seen)
    return found


def _check_leaks(world: World, start: tuple[Operation, ...], came_from: list[tuple[int, Operation | None]], number: int) -> None:
    try:
        world.check_leaks()
    except AssertionError as error:
        raise BrokenError(f"{error}: {[*start, *_string(came_from, number), 'all released']}") from error


def _note(reached: Counter[str], operation: Operation, before: World, after: World) -> None:
    """Count what an operation did."""
    reached[operation[0]] += 1
    for name in "evicted_blocks", "copied_blocks", "partial_copies":
        if getattr(after.memory.counters, name) > getattr(before.memory.counters, name):
            reached[name] += 1


def _string(came_from: list[tuple[int, Operation | None]], number: int) -> list[Operation]:
    """Return the operations that led to a state first."""
    operations: list[Operation] = []
    while True:
        number, operation = came_from[number]
        if operation is None:
            return operations[::-1]
        operations.append(operation)


def _count_strings(ways: list[list[int]], depth: int) -> list[int]:
    """Return how many strings of each length there are."""
    counts, now = [1], {0: 1}
    for _ in range(depth):
        later: dict[int, int] = {}
        for number, strings in now.items():
            for target in ways[number]:
                later[target] = later.get(target, 0) + strings
        counts.append(sum(later.values()))
        now = later
    return counts
