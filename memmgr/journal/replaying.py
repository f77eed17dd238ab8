"""A journal run again: each operation is done by a memory of our own, compared with what came of it then, and checked.

Operations are numbered from 1, over the whole file. What each returned is compared; after each, or each so many, all invariants
of the memory are checked. Trusts nothing in the file, the size of a pool neither. Whatever goes wrong is one line with the number
of the operation.

Knows runs, pools, numbers and checks; not how one operation is done again (operations.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kilburn.limits import MAX_BLOCK_SIZE
from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.journal.files import Frames, JournalError
from memmgr.journal.operations import Operations
from memmgr.journal.reading import RefusedError, entries
from memmgr.journal.summary import Summary

#: A pool of terabytes; replaying takes a GiB for it.
MAX_BLOCKS: Final = 10_000_000


class ReplayError(JournalError):
    """An operation could not be done again, came to something else, or left an invariant broken."""


class Replay:
    """See the module. Takes entries one by one."""

    def __init__(self, check_every: int = 1, max_blocks: int = MAX_BLOCKS) -> None:
        assert check_every >= 1
        self.summary: Final = Summary()
        self.memory: SwappingMemory | None = None
        self._check_every = check_every
        self._max_blocks = max_blocks
        self._counters = MemoryCounters()
        self._kind = ""  # of the operation that is being done
        self._operations: Final = Operations(self.summary, self._begin, self._done)

    def apply(self, entry: JournalEntry) -> None:
        """Do what an entry says.

        Raises:
            ReplayError: it can't be done, came to something else, or broke an invariant.
        """
        kind = entry.WhichOneof("kind")
        try:
            if kind == "run":
                self._begin_run()
            elif kind == "pool":
                self._begin_pool(entry.pool)
            elif kind == "end":
                self.summary.ended = True
            elif self.memory is None:
                raise RefusedError("no pool has begun")
            elif kind == "clock":
                self.memory.now = entry.clock
            elif kind in self._operations.rows:
                self._operations.rows[kind](self.memory, entry)
            elif kind is not None:
                self._begin(kind)
                if kind == "discard":
                    self._check(self.memory)  # the last look at this pool
                outcome = self._operations.single[kind](self.memory, entry) or 0
                if entry.HasField("outcome") and entry.outcome != outcome:
                    raise RefusedError(f"came to {outcome}, {entry.outcome} when it was recorded")
                self._done(self.memory)
            else:
                raise RefusedError("an entry that says nothing this version knows")
        except RefusedError as error:
            raise ReplayError(f"{self._place()}: {error}") from error
        except AssertionError as error:
            raise ReplayError(f"{self._place()}: an invariant does not hold: {_assertion(error)}") from error
        except Exception as error:  # whatever a file can make the core stumble over
            raise ReplayError(f"{self._place()}: it can't be done: {error!r}") from error

    def finish(self) -> None:
        """Check once more what the last operation left."""
        self._count_run()
        if self.memory is None or self._kind == "discard":
            return
        try:
            self._check(self.memory)
        except AssertionError as error:
            raise ReplayError(f"{self._place()}: an invariant does not hold: {_assertion(error)}") from error

    def _place(self) -> str:
        number = self.summary.operations
        return f"operation {number} ({self._kind}, after {self.summary.steps} steps)" if number else "before the first operation"

    def _begin(self, kind: str) -> None:
        self._kind = kind
        self.summary.operations += 1
        self.summary.kinds[kind] = self.summary.kinds.get(kind, 0) + 1

    def _done(self, memory: SwappingMemory) -> None:
        summary = self.summary
        summary.peak_live = max(summary.peak_live, memory.pool.live)
        # Not a pool that was given up: all is counted as freed, and what was held for a step's copies is still there.
        if summary.operations % self._check_every == 0 and self._kind != "discard":
            self._check(memory)

    def _check(self, memory: SwappingMemory) -> None:
        self.summary.checks += memory.check_invariants()

    def _begin_run(self) -> None:
        self._close_pool()
        summary = self.summary
        summary.killed += summary.runs > 0 and not summary.ended
        summary.runs += 1
        summary.ended = False
        self._count_run()
        self.memory = None

    def _count_run(self) -> None:
        """Add what a run's memories have counted; the next run counts anew."""
        self.summary.evicted_blocks += self._counters.evicted_blocks
        self.summary.copied_blocks += self._counters.copied_blocks
        self._counters = MemoryCounters()

    def _begin_pool(self, pool: JournalEntry.Pool) -> None:
        self._close_pool()
        if not 1 <= pool.total_blocks <= self._max_blocks:
            raise RefusedError(f"a pool of {pool.total_blocks} blocks; 1 to {self._max_blocks} are replayed (--max-blocks)")
        if pool.host_blocks > self._max_blocks:
            raise RefusedError(f"{pool.host_blocks} blocks on the host; up to {self._max_blocks} are replayed (--max-blocks)")
        if not 1 <= pool.block_size <= MAX_BLOCK_SIZE:
            raise RefusedError(f"blocks of {pool.block_size} tokens; there are such of 1 to {MAX_BLOCK_SIZE}")
        self.memory = None  # or there would be two at once
        self.memory = SwappingMemory(
            pool.total_blocks,
            pool.block_size,
            prefix_cache=pool.prefix_cache,
            counters=self._counters,
            host_blocks=pool.host_blocks,
        )
        self._operations.begin_pool()
        self.summary.pools += 1
        self.summary.blocks = max(self.summary.blocks, pool.total_blocks)

    def _close_pool(self) -> None:
        """Check what the pool's last operation left, unless it was that it is gone."""
        if self.memory is not None and self._kind != "discard":
            self._check(self.memory)


def _assertion(error: AssertionError) -> str:
    """Return what an assertion says; where it says nothing, what it asserts."""
    return str(error) or traceback.extract_tb(error.__traceback__)[-1].line or "one without a name"


#: Bytes after which a progress bar is told: some hundred operations.
_STRIDE: Final = 4096


def replay(path: Path, replaying: Replay, advance: Callable[[int], None] = lambda _: None) -> Summary:
    """Replay a journal from beginning to end; `advance` is told how many bytes are done.

    Raises:
        JournalError: the file is no journal or damaged; the text says how far it got.
        ReplayError: an operation went wrong.
        OSError: it can't be read.
    """
    summary = replaying.summary
    with path.open("rb") as file:
        frames = Frames(file)
        try:
            for frame in frames.read():
                for entry in entries(frame.payload):
                    replaying.apply(entry)
                if frame.end // _STRIDE > summary.bytes // _STRIDE:
                    advance(frame.end)
                summary.bytes = frame.end
        except ReplayError:
            raise
        except JournalError as error:
            raise JournalError(f"{error}, behind operation {summary.operations}" if frames.end else str(error)) from error
        if not frames.end and not frames.torn_bytes:
            raise JournalError("no journal: the file is empty")
        summary.torn_bytes = frames.torn_bytes
    replaying.finish()
    return summary
