"""The executor process: its life from the lock to the last frame, and the loop that runs plans.

Knows signals, the socket and the order of things; not what a plan means. The main thread owns torch and the plain DEALER socket;
a second one (executor/beats.py) says that the first one lives.
"""

import os
import signal
import socket as sockets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

import zmq

from executor.beats import Beats
from executor.clash import check_kernels_package
from executor.errors import ExecutorError, PlanError
from executor.progress import Phase, Progress
from kilburn import log as logs
from kilburn.config import ExecutorConfig
from kilburn.errors import StartError
from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS, HELLO_INTERVAL_SECONDS, PROTOCOL
from kilburn.log import Logger
from kilburn.v1.engine_pb2 import ExecutorHello, Goodbye, Inspect, StepPlan, StepResult
from kilburn.wire.endpoints import lock
from kilburn.wire.envelope import new_incarnation
from kilburn.wire.link import Link
from kilburn.wire.sockets import dealer

if TYPE_CHECKING:
    from executor.parallel import Lead
    from executor.ranks import Ranks
    from executor.runner import Runner
    from executor.startup import Ready

#: Between two looks at what is due. Half of the shortest interval that something is due at.
_POLL_MS: Final = int(500 * min(HELLO_INTERVAL_SECONDS, HEARTBEAT_INTERVAL_SECONDS))

#: Frames read in one go before the loop looks at signals and heartbeats again: two plans, and the heartbeats of a long step.
_MAX_DRAINED: Final = 64


def run(config: ExecutorConfig) -> None:
    """Be the executor until SIGTERM or SIGINT, and leave nothing behind.

    Raises:
        StartError: it can't start, or memmgr refuses it.
        PlanError: memmgr sent a plan that can't be run.
        ExecutorError: something here broke.
    """
    log = logs.configure(config.log, "executor")
    check_kernels_package()
    has_lock = False  # whoever has started the ranks, if it was executor/launch.py
    if config.tensor_parallel > 1:
        from executor.ranks import MEETING, own_rank

        has_lock = MEETING in os.environ
        if own_rank() > 0:
            _follow(config, log)
            return
    incarnation = new_incarnation()
    progress = Progress()
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        if not has_lock:
            stack.enter_context(lock(config.runtime_dir, "executor"))
        context = stack.enter_context(_zmq_context())
        beats = stack.enter_context(
            Beats(
                context=context,
                endpoint=config.executor_endpoint,
                incarnation=incarnation,
                runtime_dir=config.runtime_dir,
                progress=progress,
                log=log,
            )
        )
        with stop.at_once():
            from executor.startup import ready  # torch and transformers, after the check and the lock

            ranks = stack.enter_context(_ranks(config, log))
            made = stack.enter_context(ready(config, incarnation, progress, log, ranks))
            runner = _lead(made, ranks)
        progress.phase = Phase.RUNNING
        hello = ExecutorHello(
            protocol=PROTOCOL,
            model=made.info,
            max_slots=made.limits.max_slots,
            max_step_tokens=made.limits.max_step_tokens,
            host_blocks=made.limits.host_blocks,
        )
        socket = stack.enter_context(dealer(context.socket(zmq.DEALER), config.executor_endpoint))
        Service(socket, Link(incarnation, hello), runner, progress, log).serve(stop, beats)
        runner.end()
    log.info("ended")


def _follow(config: ExecutorConfig, log: Logger) -> None:
    """Be another rank than 0: no socket, and signals are rank 0's to obey once all are loaded."""
    progress = Progress()
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        with stop.at_once():
            from executor.parallel import follow
            from executor.startup import ready

            ranks = stack.enter_context(_ranks(config, log))
            assert ranks is not None
            made = stack.enter_context(ready(config, new_incarnation(), progress, log, ranks))
        follow(made.runner, ranks)


@contextmanager
def _ranks(config: ExecutorConfig, log: Logger) -> Iterator["Ranks | None"]:
    if config.tensor_parallel == 1:
        yield None
        return
    from executor.ranks import meet
    from executor.startup import find_device

    with meet(config.tensor_parallel, find_device(config.device).type, log) as ranks:
        yield ranks


def _lead(made: "Ready", ranks: "Ranks | None") -> "Runner | Lead":
    if ranks is None:
        return made.runner
    from executor.parallel import Lead

    return Lead(made.runner, ranks)


class Service:
    """The loop: read a frame, act on it, answer, see what is due. Plans run strictly in the order of their frames."""

    def __init__(self, socket: "zmq.Socket[bytes]", link: Link, runner: "Runner | Lead", progress: Progress, log: Logger) -> None:
        self._socket = socket
        self._link = link
        self._runner = runner
        self._progress = progress
        self._log = log
        self._losses = 0
        self._idle_since = time.perf_counter_ns()

    def serve(self, stop: "Stop", beats: Beats) -> None:
        """Serve until told to stop. Raises what `run` says."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop.fileno(), zmq.POLLIN)
        while not stop.asked:
            poller.poll(_POLL_MS)
            self._drain()
            self._follow_link()
            frame = self._link.due(time.monotonic())
            if frame is not None:
                self._send(frame)
            self._follow_link()
            self._runner.idle()
            if not beats.alive:
                raise ExecutorError("the heartbeat thread has ended")
        if self._link.connected:
            self._send(self._link.seal(Goodbye(), time.monotonic()))

    def _drain(self) -> None:
        for _ in range(_MAX_DRAINED):
            arrived = time.perf_counter_ns()
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._link.read(frame, time.monotonic())
            self._follow_link()
            if isinstance(message, StepPlan):
                self._run(message, arrived)
            elif isinstance(message, Inspect):
                self._send(self._link.seal(self._runner.inspect(message.id), time.monotonic()))
            elif message is not None:
                self._log.warning("a message that is not for an executor", kind=message.DESCRIPTOR.name)

    def _run(self, plan: StepPlan, arrived: int) -> None:
        began = time.perf_counter_ns()
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._log.error("a step failed", step=plan.step, error=str(error), exc_info=not isinstance(error, PlanError))
            failure = StepResult(step=plan.step, error=f"{type(error).__name__}: {error}")
            self._send(self._link.seal(failure, time.monotonic()))
            if isinstance(error, PlanError):
                raise
            raise ExecutorError(f"step {plan.step} failed: {type(error).__name__}: {error}") from error
        result.times.wait = max(0, arrived - self._idle_since)
        result.times.receive = began - arrived
        self._send(self._link.seal(result, time.monotonic()))
        self._idle_since = time.perf_counter_ns()

    def _follow_link(self) -> None:
        """Take note of a memmgr that was found, lost, or lost and found again since the last look."""
        if self._link.refusal:
            raise StartError(f"memmgr refuses this executor: {self._link.refusal}")
        if self._link.losses != self._losses:
            self._losses = self._link.losses
            self._runner.reset()
            if self._link.left:
                self._log.info("memmgr has left; its sequences are forgotten")
            else:
                self._log.warning("memmgr is lost; its sequences are forgotten")
        if self._link.peer != self._progress.peer:
            self._progress.peer = self._link.peer
            if self._link.connected:
                self._log.info("memmgr is there", incarnation=f"{self._link.peer:016x}")

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # Nobody is connected, or memmgr has not read for thousands of steps: the link finds it lost by its silence.
            self._log.debug("a frame found no reader")


class Stop:
    """SIGTERM and SIGINT: a wish that the loop reads, but `at_once` they end the process where it is."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        self._reader, self._writer = sockets.socketpair()

    def __enter__(self) -> "Stop":
        self._writer.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._old = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._old_hook
        signal.set_wakeup_fd(self._old_wakeup)
        self._reader.close()
        self._writer.close()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While loading, which reads no wish. Never while things are being closed: a thread would be left to use them."""
        self._at_once = True
        try:
            self._end_if_asked()
            yield
        finally:
            self._at_once = False
        self._end_if_asked()

    def fileno(self) -> int:
        """Return what to poll; a signal makes it readable."""
        return self._reader.fileno()

    def _end_if_asked(self) -> None:
        if self.asked:
            raise SystemExit(0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and self._at_once:
            raise SystemExit(0)

    def _on_unraisable(self, found: "sys.UnraisableHookArgs") -> None:
        # The signal came in the middle of a finalizer, which can't raise: `at_once` does, when the model is loaded.
        if not isinstance(found.exc_value, SystemExit):
            self._old_hook(found)


@contextmanager
def _zmq_context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.term()
