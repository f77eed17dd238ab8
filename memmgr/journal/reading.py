"""What a journal's entries say, as values that the memory takes; nothing in them is believed.

Knows no memory: whether an operation can be done is for who replays it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed

from kilburn.limits import MAX_NAME_CHARACTERS
from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.core.lineage import HASH_BYTES, Lineage
from memmgr.journal.files import JournalError


def entries(payload: bytes) -> Iterator[JournalEntry]:
    """Yield the entries of one frame, parsed one by one: what a small message unfolds to is never there twice.

    Raises:
        JournalError: it holds something else.
    """
    stream = BytesIO(payload)
    try:
        while (entry := parse_length_prefixed(JournalEntry, stream)) is not None:
            yield entry
    except (DecodeError, ValueError) as error:
        raise JournalError(f"holds something that is no entry: {' '.join(str(error).split())}") from error


class RefusedError(Exception):
    """Why an operation of the file is none."""


if TYPE_CHECKING:
    _Tokens = array[int]
else:
    _Tokens = array  # takes no type when it runs


class Part(_Tokens):
    """The tokens of a sequence from `base` on: the memory looks at no others, and the journal has no others."""

    base: int

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as array says it
        assert isinstance(index, slice)
        assert index.start >= self.base
        return array("I", super().__getitem__(slice(index.start - self.base, index.stop - self.base)))


def tokens_from(base: int, tokens: Sequence[int]) -> Part:
    """Return a sequence's tokens, of which those from number `base` on are known."""
    known = Part("I", tokens)
    known.base = base
    return known


class Outcomes:
    """What came of the operations of a row when they were recorded: nothing of the last one, where the process died in it."""

    def __init__(self, recorded: Sequence[int]) -> None:
        self._recorded = recorded
        self._used = 0

    def compare(self, what: str, outcomes: Sequence[int]) -> None:
        """Compare what one operation came to.

        Raises:
            RefusedError: it is not what was recorded.
        """
        recorded = self._recorded[self._used : self._used + len(outcomes)]
        if not recorded:
            raise RefusedError(
                f"came to {what} {list(outcomes[:8])}; when it was recorded, the process did not come back from it"
            )
        if list(recorded) != list(outcomes):
            raise RefusedError(f"came to {what} {list(outcomes[:8])}, {list(recorded[:8])} when it was recorded")
        self._used += len(outcomes)

    def finish(self, what: str) -> None:
        """See that nothing is left.

        Raises:
            RefusedError: more was recorded than the operations came to.
        """
        if self._used != len(self._recorded):
            raise RefusedError(f"{len(self._recorded) - self._used} {what} more when it was recorded")


def lineage_of(root: bytes, tenant: str) -> Lineage:
    """Return the names, none yet, of a sequence in one domain.

    Raises:
        RefusedError: there is none such.
    """
    if len(root) != HASH_BYTES or len(tenant) > MAX_NAME_CHARACTERS:
        raise RefusedError("no root of prefixes, or no tenant's name")
    return Lineage(root, tenant)
