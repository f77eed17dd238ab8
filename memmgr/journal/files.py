"""The journal as a file: frames with chained checksums behind a first line. See journal.proto for the layout.

Knows bytes; not what they mean. Who reads trusts nothing in the file: a length has a limit, and is believed only after its
checksum.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final
from zlib import crc32

from kilburn.errors import KilburnError, StartError
from kilburn.limits import MIB

FIRST_LINE: Final = b"kilburn journal 1\n"

#: What the first line of every version begins with.
_KIND: Final = b"kilburn journal "

#: Payload of one frame. The longest entry has a prompt of a million ids, under 5 MiB.
MAX_FRAME_BYTES: Final = 16 * MIB

#: What a header begins with, so that one can be looked for.
_SYNC: Final = b"\xabKJ\n"

_HEADER: Final = Struct("<4sIIII")
_CHECKED_BYTES: Final = _HEADER.size - 4

#: Of a longer journal that goes on, only so much of its end is looked at, or a restart would take longer each day. The last whole
#: frame begins in it, whatever was cut off behind it.
_END_BYTES: Final = 2 * (_HEADER.size + MAX_FRAME_BYTES)


class JournalError(KilburnError):
    """What is in the file is no journal, or is damaged."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `end` is the offset of the first byte behind it."""

    start: int
    end: int
    payload: bytes


class Frames:
    """The frames of a journal, in order. Once all are read, `torn_bytes` of an unfinished one are left at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.chain = crc32(FIRST_LINE)  # the checksum that comes before the next frame's
        self.end = 0  # of what is whole
        self.torn_bytes = 0

    def read(self) -> Iterator[Frame]:
        """Yield the frames.

        Raises:
            JournalError: this is no journal, or it is damaged.
        """
        if self.end == 0 and not self._begin():
            return
        while header := self._file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                self.torn_bytes = len(header)
                return
            found = _read_header(header)
            if found is None or found[1] != self.chain:
                raise JournalError(f"damaged at byte {self.end}")
            length, _, checksum = found
            payload = self._file.read(length)
            if len(payload) < length:
                self.torn_bytes = _HEADER.size + len(payload)
                return
            frame = Frame(self.end, self.end + _HEADER.size + length, payload)
            if crc32(payload) != checksum:
                raise JournalError(f"damaged between byte {frame.start} and {frame.end}")
            self.end, self.chain = frame.end, checksum
            yield frame

    def go_to_end(self) -> None:
        """Read all frames of a short journal, the last ones of a long one.

        Raises:
            JournalError: this is no journal, or what was read of it is damaged.
        """
        size = os.fstat(self._file.fileno()).st_size
        if size > _END_BYTES and self._begin():
            start = size - _END_BYTES
            self._file.seek(start)
            last = self._file.read()
            place, found = -1, None
            while found is None:
                place = last.find(_SYNC, place + 1)
                if place < 0:
                    raise JournalError(f"damaged behind byte {start}")
                found = _read_header(last[place : place + _HEADER.size])
            self.end, self.chain = start + place, found[1]
            self._file.seek(self.end)
        for _ in self.read():
            pass

    def _begin(self) -> bool:
        """Read the first line. False: it is cut off."""
        line = self._file.read(len(FIRST_LINE))
        if line == FIRST_LINE:
            self.end = len(line)
            return True
        if not FIRST_LINE.startswith(line):
            raise JournalError("a journal of another version" if line.startswith(_KIND) else "no journal")
        self.torn_bytes = len(line)
        return False


def _read_header(header: bytes) -> tuple[int, int, int] | None:
    """Return length, checksum of the payload before, and checksum of the payload; None where this is no header."""
    if len(header) < _HEADER.size:
        return None
    sync, length, before, checksum, header_checksum = _HEADER.unpack(header)
    if sync != _SYNC or crc32(header[:_CHECKED_BYTES]) != header_checksum or not 0 < length <= MAX_FRAME_BYTES:
        return None
    return length, before, checksum


def _header(payload: bytes, before: int, checksum: int) -> bytes:
    header = _HEADER.pack(_SYNC, len(payload), before, checksum, 0)[:_CHECKED_BYTES]
    return header + crc32(header).to_bytes(4, "little")


class JournalFile:
    """A journal that is being written: locked, positioned behind its last whole frame. `cut_bytes` were an unfinished one's."""

    def __init__(self, path: Path) -> None:
        """Open a journal, a new one or one that goes on.

        Raises:
            StartError: it can't be written, is another process's, or is no journal.
        """
        self.path: Final = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise StartError(f"--journal {path}: {error.strerror}") from error
        self._descriptor = descriptor
        try:
            self.cut_bytes: Final = self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> int:
        """Lock the file and go behind its last whole frame; return how many bytes were cut off there."""
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise StartError(f"--journal {self.path}: this is no plain file; name one, or a path where there is none yet")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                frames = Frames(file)
                frames.go_to_end()
            self._end, self._chain = frames.end, frames.chain
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            if self._end == 0:
                self._write(FIRST_LINE)
        except BlockingIOError as error:
            raise StartError(f"--journal {self.path}: another process is writing this journal; name another file") from error
        except JournalError as error:
            raise StartError(f"--journal {self.path}: {error}; it is left as it is, name another file") from error
        except OSError as error:
            raise StartError(f"--journal {self.path}: {error.strerror}") from error
        return frames.torn_bytes

    @property
    def size(self) -> int:
        """Bytes that are whole frames."""
        return self._end

    def append(self, payload: bytes) -> None:
        """Write one frame. It is the system's then: a killed process loses nothing of it, a machine without power may.

        Raises:
            OSError: it could not be written; what is in the file up to it stays good.
        """
        assert 0 < len(payload) <= MAX_FRAME_BYTES
        checksum = crc32(payload)
        try:
            self._write(_header(payload, self._chain, checksum) + payload)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._chain = checksum

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._end += len(data)

    def close(self) -> None:
        """Close the file and let go of its lock."""
        os.close(self._descriptor)
