"""The systems from outside: processes that answer one after another, and that are at rest while another one is measured.

Knows processes and the protocol of `worker`; not what is asked. A peer that waits is stopped with a signal: threads of some of
them spin. Ours has heartbeats and is left alone. What every process has taken of the processors is looked at before and after
each run, so that it is known whether those that waited did rest, and how much went to processes that are none of ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.peers.worker import About, Answer

#: Loading may compile for minutes.
_LOAD_SECONDS: Final = 1800.0
_RUN_SECONDS: Final = 900.0
_END_SECONDS: Final = 120.0

#: After this the threads that have just computed have gone to sleep, and do not take the next one's cores.
_HANDOVER_SECONDS: Final = 0.3

_LOG_TAIL_LINES: Final = 15


class MeasureError(Exception):
    """A system did not do what it was asked for: a line for people, and the end of its log."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a system's process is started."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path  # where it runs
    rests: bool  # may be stopped with a signal while it waits


@dataclass(frozen=True, slots=True)
class Run:
    """One case, done by one system. The shares are of all processors that we may use, during the run."""

    seconds: float
    answers: list[Answer]
    waiting: float  # taken by the systems that waited
    foreign: float  # taken by processes that are none of the systems


class System:
    """A process that has loaded, and is at rest."""

    def __init__(self, start: Start, log: Path) -> None:
        self.name = start.name
        self._rests = start.rests
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                list(start.command),
                cwd=start.folder,
                env=dict(start.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                # Of its own, so that all of it can be stopped; in our session, so that what is stopped ends when we are killed.
                process_group=0,
            )

    def load(self) -> About:
        """Wait until it has loaded.

        Raises:
            MeasureError: it does not load.
        """
        about = About(**self._read(_LOAD_SECONDS))
        self._pause()
        return about

    def ask(self, prompts: Sequence[Sequence[int]], outputs: int) -> tuple[float, list[Answer]]:
        """Have it do requests. Returns the seconds, and what came.

        Raises:
            MeasureError: it does not do them, or another number of tokens came.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has said why
            print(json.dumps({"prompts": prompts, "outputs": outputs}), file=self._process.stdin, flush=True)
        answer = self._read(_RUN_SECONDS)
        return answer["seconds"], [Answer(**one) for one in answer["answers"]]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            time.sleep(_HANDOVER_SECONDS)
            self._pause()

    def cpu_seconds(self) -> float:
        """Return what it, and all that it has started and that still runs, has taken of the processors."""
        return _cpu_seconds(self._process.pid)

    def close(self) -> None:
        """End it.

        Raises:
            MeasureError: it is ours and did not end well.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        status = 0
        try:
            if self._rests:  # a peer has nothing to tidy up
                return
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            status = 1
        finally:
            self._kill()
            self._process.wait()
            self._process.stdout.close()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if status:
            raise MeasureError(f"{self.name} did not end well{self._tail()}")

    def _pause(self) -> None:
        if self._rests:
            self._signal(signal.SIGSTOP)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill)  # then its output ends
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise MeasureError(f"{self.name} ended with status {self._process.wait()}{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MeasureError(f"{self.name}: {answer['error']}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in lines[-_LOG_TAIL_LINES:])


class Systems:
    """All of them. One does something at a time."""

    def __init__(self, systems: Mapping[str, System], processors: Sequence[int]) -> None:
        self._systems = systems
        self._processors = processors

    @property
    def names(self) -> list[str]:
        """Their names, in the order in which they were started."""
        return list(self._systems)

    def run(self, name: str, prompts: Sequence[Sequence[int]], outputs: int) -> Run:
        """Have one do requests.

        Raises:
            MeasureError: it does not do them.
        """
        system = self._systems[name]
        with system.awake():
            before, began = self._look(), time.monotonic()
            seconds, answers = system.ask(prompts, outputs)
            elapsed, after = time.monotonic() - began, self._look()
        whole = elapsed * len(self._processors)
        taken = {of: after[of] - before[of] for of in after}
        waiting = sum(taken[of] for of in self._systems if of != name)
        # What ends while it is looked at, and clocks that tick, may make it less than nothing.
        foreign = taken[_BUSY] - taken[_SELF] - taken[name] - waiting
        return Run(seconds, answers, max(0.0, waiting) / whole, max(0.0, foreign) / whole)

    def _look(self) -> dict[str, float]:
        """Return the processor seconds so far: of each system, of this process, and of all processes."""
        found = {name: system.cpu_seconds() for name, system in self._systems.items()}
        times = psutil.cpu_times(percpu=True)
        busy = 0.0
        for processor in self._processors:
            one = times[processor]
            busy += sum(getattr(one, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        return found | {_SELF: _own_seconds(psutil.Process()), _BUSY: busy}


_SELF: Final = "this process"
_BUSY: Final = "all processes"


def _cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants."""
    try:
        process = psutil.Process(pid)
        return sum(map(_own_seconds, (process, *process.children(recursive=True))))
    except psutil.NoSuchProcess:
        return 0.0


def _own_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
