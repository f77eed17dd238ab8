"""A running instance for as long as a block lasts: what the demonstration and the benchmarks start and end.

Knows the command line of `kilburn up` and its one line of readiness; not what is done with the instance.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli import lifeline
from kilburn.errors import KilburnError

#: The first run fetches and converts the model; `up` shows how far it is.
_START_TIMEOUT_SECONDS: Final = 1200
_STOP_TIMEOUT_SECONDS: Final = 75

_READY: Final = re.compile(r"ready: gateway (\S+), admin (\S+), model (.+)\n")


class InstanceError(KilburnError):
    """The instance did not start, or did not end well."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Where a running instance answers."""

    gateway: str
    admin: str
    model: str


@contextmanager
def instance(runtime_dir: Path, *flags: str) -> Iterator[Instance]:
    """Run `kilburn up` on free ports for the block, and end it. `flags` are further words of its command line.

    Raises:
        InstanceError: it did not start, or did not end well.
    """
    process = subprocess.Popen(
        _command(runtime_dir, flags), env=lifeline.environment_of_child(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    timer = threading.Timer(_START_TIMEOUT_SECONDS, process.terminate)  # then its output ends
    timer.start()
    try:
        line = process.stdout.readline()
        timer.cancel()
        ready = _READY.fullmatch(line)
        if ready is None:
            raise InstanceError("kilburn up did not become ready")
        yield Instance(*ready.groups())
    finally:
        timer.cancel()
        process.terminate()
        try:
            status = process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise InstanceError("kilburn up did not end") from None
    if status != 0:
        raise InstanceError(f"kilburn up ended with status {status}")


def _command(runtime_dir: Path, flags: Sequence[str]) -> list[str]:
    own = ["--runtime-dir", str(runtime_dir), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "warning"]
    return [sys.executable, "-m", "cli", "up", *own, *flags]
