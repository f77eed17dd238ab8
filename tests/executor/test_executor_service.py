"""The process: a real one, with a real ROUTER on the other side."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import zmq
from google.protobuf.message import Message

from executor import service
from executor.beats import health_path
from executor.pool import pool_path
from executor.service import Stop
from kilburn.config import ExecutorConfig, LogConfig
from kilburn.errors import StartError
from kilburn.v1.engine_pb2 import (
    Chunk,
    ExecutorHeartbeat,
    ExecutorHello,
    Heartbeat,
    Inspect,
    Inspection,
    SlotOpen,
    StepPlan,
    StepResult,
)
from kilburn.wire.endpoints import executor_endpoint, private_dir
from kilburn.wire.envelope import new_incarnation
from kilburn.wire.hub import Hub
from tests.executor.executor_help import Tables, greedy, plan, sampling, save_tiny

pytestmark = pytest.mark.processes

#: Importing torch and transformers takes 5 s on a quiet machine, and much longer on a busy one.
START_SECONDS = 120.0
ANSWER_SECONDS = 30.0

MAIN = """
import sys
from pathlib import Path
from executor.service import run
from kilburn.config import ExecutorConfig, LogConfig
run(ExecutorConfig(
    runtime_dir=Path(sys.argv[1]), executor_endpoint=sys.argv[2], model=sys.argv[3],
    attention="reference", block_size=7, num_blocks=40, max_running=5, max_step_tokens=64, poison=True,
    log=LogConfig(format="json"),
))
"""

MessageT = TypeVar("MessageT", bound=Message)


@dataclass
class Memmgr:
    """The other side: welcomes executors and remembers what it hears."""

    hub: Hub
    executor: int = 0
    hellos: list[ExecutorHello] = field(default_factory=list)
    beats: list[ExecutorHeartbeat] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)

    def pump(self, milliseconds: int = 100) -> None:
        self.hub.socket.poll(milliseconds)
        for incoming in self.hub.drain():
            body = incoming.body
            if isinstance(body, ExecutorHello):
                self.hellos.append(body)
                self.executor = incoming.incarnation
                self.hub.welcome(incoming)
            elif isinstance(body, ExecutorHeartbeat):
                self.beats.append(body)
            elif not isinstance(body, Heartbeat):
                self.heard.append(body)
        if self.executor in self.hub.peers:
            self.hub.send(self.executor, Heartbeat())

    def until(self, condition: Callable[[], bool], seconds: float = ANSWER_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            self.pump()

    def ask(self, question: StepPlan | Inspect, kind: type[MessageT]) -> MessageT:
        """Send, and return the answer."""
        assert self.hub.send(self.executor, question)
        self.until(lambda: bool(self.heard))
        answer = self.heard.pop(0)
        assert isinstance(answer, kind)
        return answer


@dataclass
class Place:
    """One instance's folders, and the processes and sockets opened for it."""

    runtime_dir: Path
    model: Path
    context: "zmq.Context[zmq.Socket[bytes]]"
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return executor_endpoint(self.runtime_dir)

    def memmgr(self) -> Memmgr:
        private_dir(self.runtime_dir)
        return Memmgr(Hub(self.context, self.endpoint, new_incarnation()))

    def start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(self.runtime_dir), self.endpoint, str(self.model)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    def config(self, **changes: object) -> ExecutorConfig:
        base: dict[str, object] = {
            "runtime_dir": self.runtime_dir,
            "executor_endpoint": self.endpoint,
            "model": str(self.model),
            "num_blocks": 10,
            "log": LogConfig(level="error"),
        }
        return ExecutorConfig(**(base | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("service") / "tiny")


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Iterator[Place]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found = Place(tmp_path / "run", model, context)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()
    context.destroy(linger=0)
    pool_path(None, found.runtime_dir).unlink(missing_ok=True)


def leftovers(place: Place) -> set[str]:
    found = {path.name for path in place.runtime_dir.iterdir()} - {"executor.sock"}
    return found | ({"the pool"} if pool_path(None, place.runtime_dir).exists() else set())


def generate(memmgr: Memmgr, prompt: list[int], outputs: int, first_step: int = 1) -> list[int]:
    """Have slot 3 generate; two plans are out at any time, as the real memmgr has it."""
    tables, tokens = Tables(40, 7), list[int]()

    def send(number: int) -> None:
        start = len(prompt) + number - 1 if number else 0
        ids = [] if number else prompt
        chunk = Chunk(slot=3, start=start, token_ids=ids, new_blocks=tables.grow(3, len(prompt) + number))
        opens = [] if number else [SlotOpen(slot=3, sampling=sampling())]
        assert memmgr.hub.send(memmgr.executor, plan(first_step + number, opens=opens, chunks=[chunk], samples=[(0, 3, number)]))

    send(0)
    for number in range(1, outputs + 1):
        if number < outputs:
            send(number)
        memmgr.until(lambda: bool(memmgr.heard))
        result = memmgr.heard.pop(0)
        assert isinstance(result, StepResult)
        assert (result.step, result.error) == (first_step + number - 1, "")
        assert result.times.receive > 0
        assert result.times.forward > 0
        tokens += result.token_ids
    return tokens


def read_health(place: Place) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(health_path(place.runtime_dir).read_text()))


def test_a_life(place: Place, model: Path) -> None:
    """Hello, plans, an inspection, heartbeats, health; another memmgr; SIGTERM, and nothing is left."""
    process = place.start()
    memmgr = place.memmgr()
    memmgr.until(lambda: memmgr.executor != 0, START_SECONDS)
    (hello,) = memmgr.hellos
    assert (hello.model.name, hello.model.context_length, hello.model.vocab_size) == ("tiny", 256, 97)
    assert (hello.model.block_size, hello.model.total_blocks, hello.model.bytes_per_block) == (7, 40, 3 * 2 * 2 * 8 * 7 * 4)
    assert (hello.model.dtype, hello.model.device, hello.model.attention_backend) == ("float32", "cpu", "reference")
    assert (hello.max_slots, hello.max_step_tokens) == (5, 64)

    prompt = [5, 17, 3, 88, 42, 9, 61, 2, 2, 70]
    expected = greedy(model, prompt, 15)
    assert generate(memmgr, prompt, 15) == expected
    inspection = memmgr.ask(Inspect(id=9), Inspection)
    assert (inspection.id, [slot.length for slot in inspection.slots], list(inspection.faults)) == (9, [24], [])

    last = ExecutorHeartbeat(phase=ExecutorHeartbeat.PHASE_RUNNING, step=15, layer=3)
    memmgr.until(lambda: bool(memmgr.beats) and memmgr.beats[-1] == last)
    # The file is written less often than a step takes.
    memmgr.until(lambda: bool(read_health(place)["connected"]))
    health = read_health(place)
    assert (health["pid"], health["phase"]) == (process.pid, "running")
    assert abs(health["unix_time"] - time.time()) < 10

    memmgr.hub.close()
    other = place.memmgr()
    other.until(lambda: other.executor != 0)
    assert other.executor == memmgr.executor
    assert other.ask(Inspect(id=1), Inspection) == Inspection(id=1, checks=1)
    assert generate(other, prompt, 15) == expected

    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=ANSWER_SECONDS)
    assert process.returncode == 0, log
    assert leftovers(place) == set()
    events = [json.loads(line)["event"] for line in log.splitlines()]
    there, lost = "memmgr is there", "memmgr is lost; its sequences are forgotten"
    assert events == ["ready", there, lost, there, "ended"]
    other.hub.close()


def test_a_plan_that_breaks_a_rule_ends_the_process(place: Place) -> None:
    """It says why, to memmgr and in its log, and leaves nothing; not even what a killed one before it had left."""
    memmgr = place.memmgr()
    for left in (pool_path(None, place.runtime_dir), health_path(place.runtime_dir), place.runtime_dir / "executor.lock"):
        left.write_text("of a process that was killed")
    process = place.start()
    memmgr.until(lambda: memmgr.executor != 0, START_SECONDS)
    result = memmgr.ask(plan(1, chunks=[Chunk(slot=0, token_ids=[1])]), StepResult)
    assert result.error == "PlanError: a chunk names slot 0, which is not open"
    _, log = process.communicate(timeout=ANSWER_SECONDS)
    assert process.returncode == 1
    assert '"event": "a step failed"' in log
    assert leftovers(place) == set()
    memmgr.hub.close()


def test_a_signal_while_loading_ends_it(place: Place) -> None:
    process = place.start()
    deadline = time.monotonic() + START_SECONDS
    while not health_path(place.runtime_dir).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert json.loads(health_path(place.runtime_dir).read_text())["phase"] == "loading"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=ANSWER_SECONDS)
    assert process.returncode == 0
    assert leftovers(place) == set()


def test_a_second_one_in_the_same_place_is_refused(place: Place) -> None:
    from kilburn.wire.endpoints import lock

    with lock(place.runtime_dir, "executor"), pytest.raises(StartError, match="already uses"):
        service.run(place.config())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "/nowhere"}, "there is no such folder"),
        ({"attention": "triton", "device": "cpu"}, "--attention triton needs an NVIDIA GPU, and the device is cpu; leave"),
        ({"attention": "nonsense"}, "there is no such backend"),
        ({"device": "tpu"}, "--device tpu: write auto, cpu, cuda or cuda:N"),
        ({"device": "cpu:1"}, "--device cpu:1: write auto"),
        ({"device": "cuda:x"}, "--device cuda:x: write auto"),
        ({"pool_dir": Path("/proc")}, "--pool-dir /proc is on a disk"),
        ({"num_blocks": 10**9}, "of memory are free"),
        ({"num_blocks": 0}, "--num-blocks is at least 1"),
        ({"num_blocks": None, "kv_memory_bytes": 100}, "too little for a block"),
    ],
)
def test_a_start_that_cannot_be_is_one_error_and_leaves_nothing(place: Place, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(StartError, match=reason) as caught:
        service.run(place.config(**changes))
    assert "\n" not in str(caught.value)
    assert leftovers(place) == set()


def test_a_refusal_by_memmgr_ends_the_start(place: Place) -> None:
    """In this process: the hub answers from a thread of its own."""
    import threading

    memmgr = place.memmgr()
    ended = threading.Event()

    def refuse() -> None:
        while not ended.is_set():
            memmgr.hub.socket.poll(50)
            for incoming in memmgr.hub.drain():
                memmgr.hub.refuse(incoming, "there is another executor")

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        with pytest.raises(StartError, match="memmgr refuses this executor: there is another executor"):
            service.run(place.config())
    finally:
        ended.set()
        thread.join()
        memmgr.hub.close()
    assert leftovers(place) == set()


def test_a_signal_ends_a_load_at_once() -> None:
    ended = "not"
    with Stop() as stop:
        try:
            with stop.at_once():
                signal.raise_signal(signal.SIGTERM)
                ended = "late"
        except SystemExit:
            ended = ended.replace("not", "at once")
    assert ended == "at once"


def test_a_signal_before_the_load_ends_it_at_its_beginning() -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit), stop.at_once():
            pytest.fail("the load began")


def test_a_signal_while_all_is_closed_cuts_nothing_short() -> None:
    """Else a thread that was to be joined uses a context that is gone."""
    closed: list[str] = []

    def refused(stack: ExitStack, stop: Stop) -> None:
        stack.callback(closed.append, "last")
        stack.callback(signal.raise_signal, signal.SIGTERM)
        with stop.at_once():
            raise StartError("no such model")

    with Stop() as stop:
        with pytest.raises(StartError), ExitStack() as stack:
            refused(stack, stop)
        assert stop.asked
    assert closed == ["last"]
