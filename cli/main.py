"""The entry of the command `kilburn`: what Ctrl-C does, from the first import to the end of the process.

The first one interrupts what is done; another one right behind it must not interrupt how that ends. So it is settled before
anything is imported that takes time, `typing` included, and Python's own end, with its threads and locks, is left out once there
was one. Knows no command.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_INTERRUPTED = 130

#: Another Ctrl-C so soon is the same wish. A later one is that of somebody who does not want to wait, and ends the process at
#: once: the first may also have been lost, in a destructor.
_SAME_WISH_SECONDS = 0.5


class _Interrupts:
    """The handler of SIGINT."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now
            raise KeyboardInterrupt
        if now - self.first > _SAME_WISH_SECONDS:
            os._exit(_INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without arguments those of the process, and Ctrl-C is settled."""
    if arguments is not None:
        return _run(arguments)
    interrupts = _Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else whoever started us wants it ignored
        signal.signal(signal.SIGINT, interrupts)
    try:
        status = _run(None)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except Exception:
        if interrupts.first is None:
            raise
        status = _INTERRUPTED  # what an interrupt left half done
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if interrupts.first is not None:
        _leave()
    return status


def _run(arguments: Sequence[str] | None) -> int:
    from cli.commands import run

    return run(arguments)


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # its reader is gone
    os._exit(_INTERRUPTED)
