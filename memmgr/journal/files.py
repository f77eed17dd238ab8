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

_HEADER: Final = Struct("<III")
_CHECKED: Final = Struct("<II")
_BUFFER_BYTES: Final = MIB


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
        self.chain = crc32(FIRST_LINE)  # what the next frame's checksums begin with
        self.end = 0  # of what is whole
        self.torn_bytes = 0

    def read(self, *, payloads: bool = True) -> Iterator[Frame]:
        """Yield the frames; without their payloads, which are then not checked either, it is a matter of seconds for gigabytes.

        Raises:
            JournalError: this is no journal, or it is damaged.
        """
        line = self._file.read(len(FIRST_LINE))
        if line != FIRST_LINE:
            self.torn_bytes = len(line)
            if not FIRST_LINE.startswith(line):
                raise JournalError("a journal of another version" if line.startswith(_KIND) else "no journal")
            return
        self.end = len(line)
        size = os.fstat(self._file.fileno()).st_size
        while header := self._file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                self.torn_bytes = len(header)
                return
            length, checksum, header_checksum = _HEADER.unpack(header)
            if crc32(header[: _CHECKED.size], self.chain) != header_checksum or not 0 < length <= MAX_FRAME_BYTES:
                raise JournalError(f"damaged at byte {self.end}")
            end = self.end + _HEADER.size + length
            payload = b""
            if payloads:
                payload = self._file.read(length)
                whole = len(payload) == length
            else:
                whole = end <= size
                self._file.seek(end)
            if not whole:
                self.torn_bytes = _HEADER.size + (len(payload) if payloads else size - self.end - _HEADER.size)
                return
            if payloads and crc32(payload, self.chain) != checksum:
                raise JournalError(f"damaged between byte {self.end} and {end}")
            frame = Frame(self.end, end, payload)
            self.end, self.chain = end, checksum
            yield frame


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
            with os.fdopen(os.dup(self._descriptor), "rb", _BUFFER_BYTES) as file:
                frames = Frames(file)
                for _ in frames.read(payloads=False):
                    pass
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
        checksum = crc32(payload, self._chain)
        checked = _CHECKED.pack(len(payload), checksum)
        try:
            self._write(checked + crc32(checked, self._chain).to_bytes(4, "little") + payload)
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
