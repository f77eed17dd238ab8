"""Beam searches, each alone in memory, that go on from the beams that a real search went on from.

The parents were recorded on the default model (benchmarks/beam_parents.py): for each step, for each of the W beams, the one of
the step before that it continues. An output that is longer than its recording begins the recording again after its first step, in
which all beams leave the prompt: that happens once.

A beam's table goes on in the first of its children, the other children fork, and who writes to a block that others hold has it
cloned; a beam without children is released. What that saves is measured as for samples (see `saturated`): requests share nothing
with one another, so that one after another they save what they would save together.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, cycle, islice
from typing import Final

from memmgr.core.memory import Admission, Memory, MemoryCounters
from memmgr.core.prefix import Lineage, Match, root_hash
from memmgr.simulate.traces import TraceRequest

_RECORDED: Final = "beam_parents.json"

#: For each step the parent of each beam.
Parents = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Sharing:
    """Blocks held, and blocks that there would be if no two tables shared one, summed over steps."""

    requests: int = 0
    refused: int = 0  # longer than the context
    steps: int = 0
    physical: int = 0
    logical: int = 0

    @property
    def saving(self) -> float:
        """The share of blocks that sharing saves."""
        return 1 - self.physical / self.logical if self.logical else 0.0


def recorded() -> dict[int, tuple[Parents, ...]]:
    """Return the searches that come with the package, by their width."""
    return parse(resources.files(__package__).joinpath(_RECORDED).read_text(encoding="ascii"))


def parse(text: str) -> dict[int, tuple[Parents, ...]]:
    """Return the searches of a recording, by width. It is ours: a wrong one is a bug."""
    searches: dict[int, tuple[Parents, ...]] = {}
    for width, lines in json.loads(text)["widths"].items():
        searches[int(width)] = tuple(tuple(tuple(map(int, step)) for step in line.split()) for line in lines)
    for width, found in searches.items():
        for parents in found:
            assert len(parents) >= 2
            assert all(len(step) == width and max(step) < width for step in parents), f"no search of {width} beams"
            assert not any(parents[0]), "before the first step there is one beam"
    return searches


def steps_of(parents: Parents, count: int) -> Iterator[tuple[int, ...]]:
    """Yield so many steps of a recording, again and again without its first."""
    return islice(chain(parents[:1], cycle(parents[1:])), count)


def replay(
    trace: Iterable[TraceRequest],
    searches: Sequence[Parents],
    block_size: int,
    context_length: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Sharing:
    """Run a trace's requests one after another, with the recorded searches in turn. A prompt and its outputs fit the context."""
    width = len(searches[0][0])
    sharing = Sharing()
    memory = Memory(width * (-(-context_length // block_size) + 1), block_size, prefix_cache=False, counters=MemoryCounters())
    for number, request in enumerate(trace):
        outputs = min(max(1, request.output_tokens), context_length - request.prompt_tokens)
        if outputs < 1:
            sharing.refused += 1
        else:
            search = Search(memory, request.prompt_tokens)
            sharing.requests += 1
            search.look(sharing)
            for parents in steps_of(searches[number % len(searches)], outputs - 1):  # the last token is never stored
                search.choose(parents)
                search.compute()
                search.look(sharing)
            search.end()
        on_progress(number + 1)
    return sharing


class Search:
    """One search. It begins with a prompt, computed by one sequence."""

    def __init__(self, memory: Memory, prompt_tokens: int) -> None:
        self._memory: Final = memory
        self._next_key = 1
        self.beams: list[Hashable] = [0]
        table = memory.admit(0, Lineage(root_hash("simulated", "", ""), ""), Admission(Match(), 0))
        self._grow(0, prompt_tokens)
        memory.end_step()
        assert table.planned == prompt_tokens

    def choose(self, parents: Sequence[int]) -> None:
        """Go on from these beams."""
        memory, old = self._memory, self.beams
        inherited: set[int] = set()
        beams: list[Hashable] = []
        for parent in parents:
            if parent not in inherited:
                inherited.add(parent)
                beams.append(old[parent])
                continue
            memory.fork(old[parent], self._next_key)
            beams.append(self._next_key)
            self._next_key += 1
        for lane, key in enumerate(old):
            if lane not in inherited:
                memory.release(key, array("I"))
        self.beams = beams

    def compute(self) -> None:
        """Store one token of each beam."""
        for key in self.beams:
            self._grow(key, 1)
        self._memory.end_step()

    def look(self, sharing: Sharing) -> None:
        """Add the state of one step to the sums."""
        sharing.steps += 1
        sharing.physical += self._memory.pool.live
        sharing.logical += sum(len(self._memory.tables[key].blocks) for key in self.beams)

    def end(self) -> None:
        """Let go of everything."""
        for key in self.beams:
            self._memory.release(key, array("I"))
        self.beams = []

    def _grow(self, key: Hashable, count: int) -> None:
        growth = self._memory.plan_growth(self._memory.tables[key], count)
        assert growth is not None, "the memory holds each beam's context"
        self._memory.grow(growth)
