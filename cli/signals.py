"""Signals as something to wait for, so that nothing acts inside a handler."""

import os
import select
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Self

STOPS: frozenset[int] = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Signals:
    """Catches the given signals while it is entered, in the main thread. Children that are started meanwhile get the defaults."""

    def __init__(self, caught: Iterable[int]) -> None:
        self._caught = frozenset(caught)
        self._arrived: list[int] = []

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in self._caught}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_seconds: float) -> int | None:
        """Return a signal that has arrived, oldest first, or None after the time."""
        if not self._arrived:
            ready, _, _ = select.select([self._reader], [], [], timeout_seconds)
            if not ready:
                return None
            self._arrived = [number for number in os.read(self._reader, 64) if number in self._caught]
        return self._arrived.pop(0) if self._arrived else None


def _nothing(number: int, frame: FrameType | None) -> None:
    """Let the number go to the wakeup descriptor, which a signal without a handler does not do."""
