"""Contenders measured in turns, so that whatever changes in the machine changes for all of them.

Knows clocks and medians; not what is measured. A round gives each contender one turn, every second round in the opposite
order; a turn is some calls that are not counted, which take the processor and the threads over from whoever was before, then
some that are. What is said of two contenders is the median of the rounds' ratios.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

#: A turn lasts about so long, if a call does not last longer.
_TURN_SECONDS: Final = 0.01
_MOST_CALLS: Final = 256

#: Of a turn's calls one in so many is not counted, on top of the others: the first ones.
_UNCOUNTED: Final = 4

#: However long they take, a case has so many rounds before its time can be over.
_LEAST_ROUNDS: Final = 3


class Contender(Protocol):
    """Something that can be done again and again."""

    def turn(self, uncounted: int, calls: int) -> list[float]:
        """Do the next calls, and return the seconds of each that counts."""


class Clock(Protocol):
    """Times calls on a device."""

    def time(self, call: Callable[[int], object], first: int, uncounted: int, calls: int) -> list[float]:
        """Call with first, first + 1, ...; return the seconds of each that counts."""


class CpuClock:
    """Calls return when they are done."""

    def time(self, call: Callable[[int], object], first: int, uncounted: int, calls: int) -> list[float]:
        """See Clock."""
        for number in range(first, first + uncounted):
            call(number)
        found = []
        for number in range(first + uncounted, first + uncounted + calls):
            began = time.perf_counter()
            call(number)
            found.append(time.perf_counter() - began)
        return found


class CudaClock:
    """Calls return when they are queued: events around each tell its time on the device."""

    def time(self, call: Callable[[int], object], first: int, uncounted: int, calls: int) -> list[float]:
        """See Clock."""
        for number in range(first, first + uncounted):
            call(number)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
        for at in range(calls):
            events[2 * at].record()
            call(first + uncounted + at)
            events[2 * at + 1].record()
        torch.cuda.synchronize()
        return [events[2 * at].elapsed_time(events[2 * at + 1]) / 1e3 for at in range(calls)]


class Here:
    """A contender in this process: a function of the number of the call."""

    def __init__(self, call: Callable[[int], object], clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._next = 0

    def turn(self, uncounted: int, calls: int) -> list[float]:
        """See Contender."""
        first, self._next = self._next, self._next + uncounted + calls
        return self._clock.time(self._call, first, uncounted, calls)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one case: it ends with whichever comes first."""

    rounds: int
    seconds: float


def measure(contenders: Mapping[str, Contender], limits: Limits, tell: Callable[[], None]) -> dict[str, list[float]]:
    """Give the contenders turns. Returns for each the seconds of a call, the median of its turn, round by round."""
    calls = {}
    for name, contender in contenders.items():
        once = min(contender.turn(1, 2))
        calls[name] = min(_MOST_CALLS, max(1, round(_TURN_SECONDS / max(once, 1e-9))))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    end = time.monotonic() + limits.seconds
    for number in range(limits.rounds):
        if number >= _LEAST_ROUNDS and time.monotonic() >= end:
            break
        for name in names if number % 2 == 0 else reversed(names):
            # A call that takes a whole turn needs none before it.
            uncounted = -(-calls[name] // _UNCOUNTED) if calls[name] > 1 else 0
            found[name].append(statistics.median(contenders[name].turn(uncounted, calls[name])))
        tell()
    return found


def fastest(contenders: Mapping[str, Contender], tries: int = 3) -> str:
    """Return the name of the one whose best call is the shortest."""
    best = {name: min(contender.turn(1, tries)) for name, contender in contenders.items()}
    return min(best, key=best.__getitem__)


def ratio(of: Sequence[float], by: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(of, by, strict=True))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the mean of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
