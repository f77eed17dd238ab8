"""The pieces of the eviction order: runs of blocks that became cached at one time, and segments made of runs. See `blocks`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final


class Run:
    """Blocks that became cached at one time, the next to be evicted first.

    `blocks[first:]` has those that are in the run, `held` of them, and others that have left.
    """

    __slots__ = ("at", "blocks", "first", "held", "segment")

    def __init__(self, at: float, segment: Segment, blocks: list[int]) -> None:
        self.blocks = blocks
        self.first = 0
        self.held = len(blocks)
        self.at: Final = at
        self.segment = segment

    @property
    def whole(self) -> bool:
        """Whether no block has left but from the front."""
        return self.held == len(self.blocks) - self.first


class Segment:
    """A part of the eviction order. `held` blocks are in its runs, the oldest run first; none is empty."""

    __slots__ = ("held", "last", "runs")

    def __init__(self) -> None:
        self.held = 0
        self.runs: Final[OrderedDict[Run, None]] = OrderedDict()
        self.last = Run(0.0, self, [])  # what was made last, in the order or empty

    def run_at(self, now: float) -> Run:
        """Return the run that blocks enter now: the last one, while it is here, of the same time and whole, or a new one.

        In a run that is whole no block is a second time, so that its entry says all.
        """
        run = self.last
        if run.at != now or run.held != len(run.blocks) - run.first or run.segment is not self:
            run = self.last = Run(now, self, [])
        return run

    def append(self, run: Run, blocks: list[int]) -> None:
        """Let blocks that know that they are in the run be in it."""
        if not blocks:
            return
        self.held += len(blocks)
        run.held += len(blocks)
        if run.blocks:
            run.blocks += blocks
        else:
            run.blocks = blocks
            self.runs[run] = None  # at the end
