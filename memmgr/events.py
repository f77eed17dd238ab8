"""The last events, in a ring: numbered and stamped when they are taken in, turned into messages when somebody reads them.

The engine's thread takes in, any other may read. What was taken in together stays together and is never changed, so that taking
in costs no more than keeping a list, and readers hold nothing up: whoever is too slow finds that what it wanted is gone.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, cast

from kilburn.limits import MAX_EVENTS_HELD
from kilburn.v1 import admin_pb2 as admin
from memmgr.core import events
from memmgr.core.events import Indexed, Record, Unindexed

#: Kinds whose detail is what the block was known by.
_UNINDEXING: Final = frozenset({events.EVICTED, events.FLUSHED, events.PINNED, events.UNPINNED})

#: Up to this block size the ring holds MAX_EVENTS_HELD events; with larger blocks fewer: an INDEXED one has a block's tokens.
_USUAL_BLOCK_SIZE: Final = 64

#: Events looked at for one page.
_EVENTS_AT_ONCE: Final = 4096

#: Bytes that a message in a repeated field takes beside its own: tag and length.
_FRAMING_BYTES: Final = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that were taken in together, numbered from `first`; a tuple, for the collector's sake (see core/events.py)."""

    first: int
    unix_time: float
    step: int
    records: tuple[Record, ...]

    @property
    def last(self) -> int:
        """The number of the last record."""
        return self.first + len(self.records) - 1


#: In the place of a batch that is not held any more.
_GIVEN_UP: Final = Batch(0, 0.0, 0, ())


class EventLog:
    """See the module."""

    def __init__(self, most: int = MAX_EVENTS_HELD) -> None:
        assert most >= 1
        self._most: Final = most
        self._lock: Final = threading.Lock()
        self._batches: list[Batch] = []  # from _gone on; what is before is given up, and cut off now and then
        self._gone = 0
        self._held = 0
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """The number of the last event; 0 where there was none."""
        return self._cursor

    @property
    def oldest(self) -> int:
        """The number of the oldest event that is held; one more than the last where none is."""
        with self._lock:
            return self._cursor - self._held + 1

    def take(self, records: list[Record], unix_time: float, step: int, block_size: int) -> None:
        """Take in what has happened, and leave the list empty."""
        if not records:
            return
        most = self._most if block_size <= _USUAL_BLOCK_SIZE else max(1, self._most * _USUAL_BLOCK_SIZE // block_size)
        taken = tuple(records[-most:])
        first = self._cursor + len(records) - len(taken) + 1
        with self._lock:
            if len(taken) < len(records):
                self._batches, self._gone, self._held = [], 0, 0  # nothing older may be held with a gap behind it
            self._batches.append(Batch(first, unix_time, step, taken))
            self._cursor += len(records)
            self._held += len(taken)
            while self._held - len(self._batches[self._gone].records) >= most:  # whole batches: `most` are held, less than twice
                self._held -= len(self._batches[self._gone].records)
                self._batches[self._gone] = _GIVEN_UP  # free now: half of the ring at once would take 30 ms
                self._gone += 1
            if 2 * self._gone > len(self._batches):
                del self._batches[: self._gone]
                self._gone = 0
        records.clear()

    def after(self, cursor: int, most: int | None = None) -> list[Batch]:
        """Return the batches with the events after `cursor` that are held, or with the first `most` of them.

        The first batch may begin before them, the last end behind them.
        """
        with self._lock:
            start = bisect_right(self._batches, cursor + 1, lo=self._gone, key=lambda batch: batch.first) - 1
            start = max(start, self._gone)
            if most is None:
                return self._batches[start:]
            if start < len(self._batches):
                cursor = max(cursor, self._batches[start].first - 1)
            stop = start
            while stop < len(self._batches) and self._batches[stop].first <= cursor + most:
                stop += 1
            return self._batches[start:stop]


# ----------------------------------------------------------------------------------------------------------- messages


def read_page(
    log: EventLog, cursor: int, lost: int, kinds: Collection[int], incarnation: str, page_bytes: int
) -> tuple[admin.EventPage, int, int]:
    """Return a page of the events after `cursor`, of some kinds or all; the cursor that it reaches; how many lost are untold.

    `lost` events, and those that it finds to be gone, are told of with the first event on the page. It looks at a bounded number
    of events, and may be empty where none is of the kinds.
    """
    page, size = admin.EventPage(), 0
    batches = log.after(cursor, _EVENTS_AT_ONCE)
    looked_at = 0
    for batch in batches:
        lost += max(0, batch.first - cursor - 1)
        for number in range(max(batch.first, cursor + 1), batch.last + 1):
            cursor = number
            looked_at += 1
            if not kinds or batch.records[number - batch.first][0] in kinds:
                event = event_message(batch, number, incarnation)
                event.lost, lost = lost, 0
                page.events.append(event)
                size += event.ByteSize() + _FRAMING_BYTES
            if size > page_bytes or looked_at == _EVENTS_AT_ONCE:
                return page, cursor, lost
    return page, cursor, lost


def history(batches: list[Batch], block: int, most: int, incarnation: str) -> list[admin.Event]:
    """Return the last events that touched a block, as itself or as the source of a copy, the newest first."""
    found: list[admin.Event] = []
    for batch in reversed(batches):
        for offset in range(len(batch.records) - 1, -1, -1):
            record = batch.records[offset]
            if record[1] == block or (record[0] == events.COPIED and record[3] == block):
                found.append(event_message(batch, batch.first + offset, incarnation))
                if len(found) == most:
                    return found
    return found


def event_message(batch: Batch, number: int, incarnation: str) -> admin.Event:
    """Return event `number` of a batch as a message."""
    kind, block, owner, detail = batch.records[number - batch.first]
    event = admin.Event(
        cursor=number,
        memmgr_incarnation=incarnation,
        unix_time=batch.unix_time,
        step=batch.step,
        kind=admin.EventKind.ValueType(kind),
    )
    if block != events.NO_BLOCK:
        event.block = block
    if isinstance(owner, tuple):
        event.tenant, event.request_id, event.index = owner
    if kind == events.INDEXED:
        name, parent, tokens, event.tenant = cast(Indexed, detail)
        event.prefix_hash, event.parent_hash = name, parent
        event.token_ids.extend(array("I", tokens))
    elif kind in _UNINDEXING:
        event.prefix_hash, event.tenant = cast(Unindexed, detail)
    elif kind == events.COPIED:
        event.source = cast(int, detail)
    return event
