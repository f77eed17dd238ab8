"""Plans that have left, and what becomes of their results: a result applies to its request wherever that is by now.

What was computed is acknowledged to the memory where the sequence still is what it was when the plan left: running, and not
admitted anew since. What was sampled goes to its sequence; for one that has ended it is discarded and counted.

Knows plans in flight and results; not how a plan came about (planning.py), nor what ends a sequence (outputs.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from memmgr.core.memory import Memory
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.lanes import Searches
from memmgr.schedule.outputs import Outputs
from memmgr.schedule.plans import Sampled
from memmgr.schedule.queues import Queues
from memmgr.schedule.requests import Sequence, State


@dataclass(slots=True)
class Row:
    """One sequence's part in a plan that has left: positions start .. end - 1.

    `samples`: the sequences that its last logits are sampled for. `forks`: those that share its tokens from then on. `tells`: it
    has a part in what is told of prompts.
    """

    sequence: Sequence
    residence: int
    start: int
    end: int
    samples: tuple[Sequence, ...]
    forks: tuple[Sequence, ...]
    tells: bool = False


class Results:
    """See the module."""

    __slots__ = ("_counters", "_forming", "_in_flight", "_memory", "_outputs", "_queues", "_searches")

    def __init__(self, memory: Memory, queues: Queues, outputs: Outputs, searches: Searches, counters: ScheduleCounters) -> None:
        self._memory: Final = memory
        self._queues: Final = queues
        self._forming: Final = queues.forming
        self._outputs: Final = outputs
        self._searches: Final = searches
        self._counters: Final = counters
        self._in_flight: deque[tuple[int, list[Row]]] = deque()

    def __len__(self) -> int:
        """Return how many plans are out whose results are not back."""
        return len(self._in_flight)

    def expect(self, step: int, rows: list[Row]) -> None:
        """Take note that a plan leaves; `rows` in the order of its chunks, their samples in the order of its samples.

        Whoever made it has counted it in each sequence's `in_flight`: it goes through them anyway.
        """
        self._in_flight.append((step, rows))

    def clear(self) -> None:
        """Forget what is out: no results will come."""
        self._in_flight.clear()

    def complete(self, step: int, sampled: Iterable[Sampled], now: float, told: Iterable[tuple[object, ...]] = ()) -> None:
        """Take in the result of the oldest plan in flight: one Sampled for each of its samples, in their order.

        `told`: what became of each of its tellings.
        """
        expected, rows = self._in_flight.popleft()
        assert step == expected, f"the result of step {step} came, {expected} was due"
        self._memory.now = now
        self._counters.acknowledged_steps += 1
        results, tellings, append = iter(sampled), iter(told), self._outputs.append
        for row in rows:
            row.sequence.in_flight -= 1
            for sequence in row.samples:
                sequence.in_flight -= sequence is not row.sequence
            outcomes = [(sequence, next(results)) for sequence in row.samples]
            self._acknowledge(row)
            if row.tells:
                self._outputs.tell(row.sequence.request, next(tellings))
            for sequence, result in outcomes:
                if result.failed:
                    self._distrust(sequence)
                append(sequence, result, now)
            if row.sequence.request.search is not None:
                self._searches.note(row.sequence.request)

    def _acknowledge(self, row: Row) -> None:
        """Take note of what a row computed, where its sequence still is what it was when the row left."""
        sequence, request = row.sequence, row.sequence.request
        if sequence.ended:
            self._counters.discarded_tokens += row.end - row.start
        else:
            self._counters.count_computed(sequence, row.start, row.end)
        if request.state is not State.RUNNING or row.residence != request.residence:
            return
        for one in (sequence, *row.forks):
            if one.table is not None:
                self._memory.acknowledge(one.table, row.end, one.tokens)
        if sequence.table is not None and self._forming.leads(sequence):
            self._queues.arrived(sequence, sequence.table.committed)

    def _distrust(self, sequence: Sequence) -> None:
        """Have nothing found of a sequence whose logits were no numbers, or whoever begins with the same tokens fails as well."""
        if sequence.table is not None:
            self._memory.distrust(sequence.table)
        else:
            self._memory.distrust_cached(sequence.lineage, sequence.tokens)  # it was released meanwhile

    def in_flight(self) -> dict[Sequence, int]:
        """Return how many plans are out that compute or sample something, for each sequence that they do it for."""
        counts: dict[Sequence, int] = {}
        for _, rows in self._in_flight:
            for row in rows:
                for sequence in {row.sequence, *row.samples}:
                    counts[sequence] = counts.get(sequence, 0) + 1
        return counts
