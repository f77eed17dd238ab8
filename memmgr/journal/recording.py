"""From operations to entries of a journal, and when these are written.

What a `Journal` is told it keeps until `flush`, which the engine calls once a round, after its plans have left: never more than
some MiB. Growing and acknowledging are nearly all that happens: such operations in a row are one entry.

What can't be written ends the journal and nothing else: one line in the log, and serving goes on.

Knows the journal's entries; not the memory, nor the file's layout.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from io import BytesIO
from typing import Final

from google.protobuf.proto import serialize_length_prefixed

from kilburn import __version__
from kilburn.limits import MIB
from kilburn.log import Logger
from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.journal.files import MAX_FRAME_BYTES, JournalFile

#: Operations in one entry, and tokens in it: more begin another one. Entries in one frame, in bytes: more are written at once.
_MAX_OPERATIONS: Final = 4096
_MAX_TOKENS: Final = 65536
_MAX_BUFFERED_BYTES: Final = MIB


class Journal:
    """See the module. One journal records one memory manager's pools, one after another."""

    def __init__(self, file: JournalFile, log: Logger, unix_seconds: float) -> None:
        self._file: JournalFile | None = file
        self._log = log
        self._buffer = BytesIO()
        self._clock = 0.0
        self._entry: JournalEntry | None = None  # of the last operation; its outcome may still come
        # The operations in a row; nothing else happens until they are an entry.
        self._growing = False  # or else acknowledging
        self._sequences: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[int] = []
        self._outcomes: list[int] = []
        entry = self.begin()
        entry.run.version = __version__
        entry.run.started_unix_seconds = unix_seconds
        entry.run.cut_bytes = file.cut_bytes
        self.flush()

    @property
    def written_bytes(self) -> int:
        """The size of the file; 0 where it is no longer written."""
        return 0 if self._file is None else self._file.size

    def begin_pool(self, total_blocks: int, block_size: int, *, prefix_cache: bool, host_blocks: int) -> bool:
        """A new pool is there, in the place of the one before. False: nothing will be recorded, the file can't be written."""
        if self._file is None:
            return False
        pool = self.begin().pool
        pool.total_blocks, pool.block_size = total_blocks, block_size
        pool.prefix_cache, pool.host_blocks = prefix_cache, host_blocks
        self._clock = 0.0
        return True

    # ---------------------------------------------------------------------------------------------- the operations

    def begin(self, now: float | None = None) -> JournalEntry:
        """Return the entry of one operation, to be filled before it is done, but for its outcome."""
        self._settle()
        if now is not None and now != self._clock:
            self._clock = now
            self._put(JournalEntry(clock=now))
        entry = self._entry = JournalEntry()
        return entry

    def grow(self, now: float, sequence: int, count: int) -> None:
        """A sequence is about to grow by `count` tokens."""
        if not self._growing or now != self._clock or len(self._sequences) >= _MAX_OPERATIONS:
            self._begin_row(now, growing=True)
        self._sequences.append(sequence)
        self._counts.append(count)

    def acknowledge(self, now: float, sequence: int, count: int, tokens: array[int] | None) -> None:
        """A sequence is about to have `count` more tokens computed; `tokens` are those of the blocks that are full by that."""
        if (
            self._growing
            or now != self._clock
            or not 0 < len(self._sequences) < _MAX_OPERATIONS
            or len(self._tokens) >= _MAX_TOKENS
        ):
            self._begin_row(now, growing=False)
        self._sequences.append(sequence)
        self._counts.append(count)
        if tokens is not None:
            self._tokens.extend(tokens)

    def came(self, outcomes: Sequence[int]) -> None:
        """What came of the last operation in a row."""
        self._outcomes.extend(outcomes)

    def _begin_row(self, now: float, *, growing: bool) -> None:
        self._settle()
        if now != self._clock:
            self._clock = now
            self._put(JournalEntry(clock=now))
        self._growing = growing

    def _settle(self) -> None:
        """Put the entry of what was recorded last into the buffer."""
        if self._entry is not None:
            self._put(self._entry)
            self._entry = None
        if self._sequences:
            entry = JournalEntry()
            if self._growing:
                entry.grow.sequences.extend(self._sequences)
                entry.grow.counts.extend(self._counts)
                entry.grow.blocks.extend(self._outcomes)
            else:
                entry.acknowledge.sequences.extend(self._sequences)
                entry.acknowledge.counts.extend(self._counts)
                entry.acknowledge.tokens.extend(self._tokens)
                entry.acknowledge.nodes.extend(self._outcomes)
            self._put(entry)
            for column in (self._sequences, self._counts, self._tokens, self._outcomes):
                column.clear()
        self._growing = False

    def _put(self, entry: JournalEntry) -> None:
        serialize_length_prefixed(entry, self._buffer)
        if self._buffer.tell() >= _MAX_BUFFERED_BYTES:
            self._write()

    # ---------------------------------------------------------------------------------------------------- the file

    def flush(self) -> None:
        """Write what was recorded. Between two operations only."""
        self._settle()
        if self._buffer.tell():
            self._write()

    def _write(self) -> None:
        payload = self._buffer.getvalue()
        self._buffer = BytesIO()
        if self._file is None:
            return
        reason: str | None = None
        if len(payload) > MAX_FRAME_BYTES:
            reason = f"an entry of {len(payload)} bytes; at most {MAX_FRAME_BYTES} can be read again"
        else:
            try:
                self._file.append(payload)
            except OSError as error:
                reason = error.strerror
        if reason is not None:
            self._log.error(
                "the journal ends here: it can't be written; serving goes on without it",
                journal=str(self._file.path),
                reason=reason,
                whole_bytes=self._file.size,
            )
            self._file.close()
            self._file = None

    def close(self, *, ended: bool) -> None:
        """Write what is left and close the file. `ended`: as asked to, not by an error."""
        if ended:
            self.begin().end.SetInParent()
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
