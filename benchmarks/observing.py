"""What looking costs: the step rate while tools read the allocator, and the longest step during a dump of a million blocks.

    python -m benchmarks.observing [--json] [--seconds 20] [-- FLAGS OF kilburn up]

First an instance with 64 sequences decoding in a pool of 4,096 blocks. In turn nobody looks, and GetPool is asked for every 10 ms
and the full ListBlocks each second, for so many seconds each, five times. In both, the last processor is for all but the
executor, which has the others: what is measured is whether the memory manager is held up, not who else computes on a processor
that the model needs, as it would on none where the executor has a GPU. Steps are counted from the beginning of one to the
beginning of another. Then the memory manager alone on the last processor, with a million blocks and an executor that answers at
once: the gaps between its steps, quiet and during dumps.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import click
import psutil
import zmq
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.answering import AnsweringExecutor, KeepingGateway
from benchmarks.options import Seconds, help_of
from cli.instance import instance
from kilburn.client import AdminClient, Client
from kilburn.v1 import inference_pb2 as api
from kilburn.wire.endpoints import executor_endpoint, gateway_endpoint

_SEQUENCES: Final = 64
_BLOCKS: Final = 4096
_PAIRS: Final = 5
_POOL_SECONDS: Final = 0.01
_BLOCKS_SECONDS: Final = 1.0
_MILLION: Final = 1_000_000
_DUMPS: Final = 5
_START_SECONDS: Final = 120.0
_PROMPT_TOKENS: Final = 32
_OUTPUT_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class Processors:
    """Those that we may use, two at least."""

    others: list[int]
    last: int

    @classmethod
    def ours(cls) -> Processors:
        """Return this process's."""
        *others, last = sorted(os.sched_getaffinity(0))
        if not others:
            raise click.ClickException("two processors are needed")
        return cls(others, last)


@dataclass(frozen=True, slots=True)
class Watched:
    """Steps a second, nobody looking and looked at; the pair whose change is the median."""

    quiet: float
    watched: float
    change: float
    changes: tuple[float, ...]
    pools_read: int
    dumps_read: int


@dataclass(frozen=True, slots=True)
class Dumped:
    """Milliseconds between two steps of the memory manager: the median, and the longest, quiet and during dumps."""

    blocks: int
    dump_seconds: float
    median_quiet_ms: float
    longest_quiet_ms: float
    median_dumping_ms: float
    longest_dumping_ms: float


# ------------------------------------------------------------------------------------------------ the watched instance


def _load(gateway: str, processor: int) -> None:
    """Keep the sequences decoding for ever, in a process of its own."""
    os.sched_setaffinity(0, {processor})
    with Client(gateway) as client:
        vocab_size = client.model().vocab_size
        threads = [
            threading.Thread(target=_stream, args=(client, number, vocab_size), daemon=True) for number in range(_SEQUENCES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _stream(client: Client, number: int, vocab_size: int) -> None:
    chance = random.Random(number)  # noqa: S311 - prompts, not secrets
    outputs = (
        1 + number * _OUTPUT_TOKENS // _SEQUENCES
    )  # the first is a part of one, so that they do not all end and begin at once
    while True:
        ids = [chance.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)]
        request = api.GenerateRequest(
            token_ids=api.TokenIds(ids=ids),
            sampling=api.Sampling(temperature=0),
            stopping=api.Stopping(max_tokens=outputs, ignore_eos=True),
        )
        for _ in client.generate(request):
            pass
        outputs = _OUTPUT_TOKENS


def watch(seconds: float, flags: Sequence[str], processors: Processors, progress: Progress) -> Watched:
    """Measure the first part."""
    task = progress.add_task("watching", total=2 * _PAIRS)
    computing, processor = processors.others, processors.last
    os.environ.setdefault("OMP_NUM_THREADS", str(len(computing)))  # for the executor
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="kilburn-bench-") as folder,
        instance(Path(folder) / "run", "--num-blocks", str(_BLOCKS), *flags) as running,
        AdminClient(running.admin) as admin,
    ):
        for process in psutil.Process().children(recursive=True):
            _place(process.pid, computing if "executor" in process.cmdline() else [processor])
        load = context.Process(target=_load, args=(running.gateway, processor), daemon=True)
        load.start()
        os.sched_setaffinity(0, {processor})
        try:
            deadline = time.monotonic() + _START_SECONDS
            while admin.pool().running < _SEQUENCES:
                if time.monotonic() > deadline:
                    raise click.ClickException(f"{_SEQUENCES} sequences did not come to run at once")
                time.sleep(0.2)
            rates: list[tuple[float, float]] = []
            pools = dumps = 0
            for pair in range(_PAIRS):
                found: dict[bool, float] = {}
                for looks in (False, True) if pair % 2 == 0 else (True, False):  # so that a drift falls on both
                    found[looks], read, dumped = _arm(admin, seconds, looks=looks)
                    pools, dumps = pools + read, dumps + dumped
                    progress.advance(task)
                rates.append((found[False], found[True]))
        finally:
            load.terminate()
            load.join()
    changes = [watched / quiet - 1 for quiet, watched in rates]
    middle = sorted(range(_PAIRS), key=lambda pair: changes[pair])[_PAIRS // 2]
    return Watched(*rates[middle], changes[middle], tuple(changes), pools, dumps)


def _place(pid: int, processors: list[int]) -> None:
    """Keep a process, all of its threads, on some processors."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, processors)


def _arm(admin: AdminClient, seconds: float, *, looks: bool) -> tuple[float, int, int]:
    """Return the steps a second, and how often the pool and the blocks were read."""
    first, began = _next_step(admin)
    end, dump_at, pools, dumps = began + seconds, began, 0, 0
    while (now := time.monotonic()) < end:
        if not looks:
            time.sleep(end - now)
            continue
        if now >= dump_at:
            assert sum(1 for _ in admin.blocks()) == _BLOCKS
            dump_at, dumps = dump_at + _BLOCKS_SECONDS, dumps + 1
        else:
            admin.pool()
            pools += 1
            time.sleep(max(0.0, _POOL_SECONDS - (time.monotonic() - now)))
    last, ended = _next_step(admin)
    return (last - first) / (ended - began), pools, dumps


def _next_step(admin: AdminClient) -> tuple[int, float]:
    """Wait for the next step to begin; return its number, and when that was."""
    before = step = admin.pool().step
    while step == before:
        time.sleep(_POOL_SECONDS)
        step = admin.pool().step
    return step, time.monotonic()


# -------------------------------------------------------------------------------------------------- a million blocks


@contextmanager
def _memory_manager(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a memory manager alone; its admin address, and its process."""
    words = ["memmgr", "--runtime-dir", str(folder), "--admin", "127.0.0.1:0", "--max-running", str(_SEQUENCES)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *words, "--log-format", "json"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        address = ""
        while not address:
            line = process.stderr.readline()
            if not line:
                raise click.ClickException("the memory manager did not start")
            address = json.loads(line).get("admin", "")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or it blocks on a full pipe
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)


def _answer(folder: Path, wishes: Connection, times: Connection) -> None:
    """Keep the memory manager at work, in a process of its own; tell when each step was answered, once anything is wished."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    executor = AnsweringExecutor(context, executor_endpoint(folder), _MILLION, 16, _SEQUENCES)
    gateway = KeepingGateway(context, gateway_endpoint(folder), _SEQUENCES, 256, 256)
    gc.disable()  # a pause here would look like one there
    stopping = threading.Event()

    def keep() -> None:
        while not stopping.is_set():
            gateway.listen()

    thread = threading.Thread(target=keep)
    thread.start()
    while not wishes.poll():
        executor.listen()
    stopping.set()
    thread.join()
    times.send_bytes(json.dumps([executor.answered, gateway.refused]).encode())
    executor.close()
    gateway.close()
    context.term()


def dump(processors: Processors, progress: Progress) -> Dumped:
    """Measure the second part."""
    task = progress.add_task("dumping", total=_DUMPS + 1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kilburn-bench-") as name, _memory_manager(Path(name) / "run") as (address, pid):
        _place(pid, [processors.last])
        _place(os.getpid(), processors.others)  # and so whom we start
        wished, wish = spawn.Pipe(duplex=False)
        answers, times = spawn.Pipe(duplex=False)
        load = spawn.Process(target=_answer, args=(Path(name) / "run", wished, times), daemon=True)
        load.start()
        try:
            with AdminClient(address) as admin:
                deadline = time.monotonic() + _START_SECONDS
                while admin.pool().running < _SEQUENCES and time.monotonic() < deadline:
                    time.sleep(0.2)
                quiet_from = time.monotonic()
                time.sleep(5)
                quiet_to = time.monotonic()
                progress.advance(task)
                os.nice(19)  # reading a million blocks keeps a processor busy: not the one that the steps need
                for _ in range(_DUMPS):
                    assert sum(1 for _ in admin.blocks()) == _MILLION
                    progress.advance(task)
                dumping_to = time.monotonic()
            wish.send_bytes(b"tell")
            answered, refused = json.loads(answers.recv_bytes())
        finally:
            load.join(10)
            load.kill()
    if refused:
        raise click.ClickException(f"a request was refused: {refused}")
    quiet = _gaps([at for at in answered if quiet_from <= at < quiet_to])
    dumping = _gaps([at for at in answered if quiet_to <= at < dumping_to])
    return Dumped(
        blocks=_MILLION,
        dump_seconds=(dumping_to - quiet_to) / _DUMPS,
        median_quiet_ms=statistics.median(quiet),
        longest_quiet_ms=max(quiet),
        median_dumping_ms=statistics.median(dumping),
        longest_dumping_ms=max(dumping),
    )


def _gaps(times: Sequence[float]) -> list[float]:
    """Return the milliseconds between one step and the next."""
    if len(times) < 2:
        raise click.ClickException("the memory manager made no steps")
    return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]


def show_watched(watched: Watched, console: Console) -> None:
    """Print the first part for people."""
    table = Table(title=f"{_SEQUENCES} sequences in {_BLOCKS:,} blocks: steps a second, the median of {_PAIRS} pairs")
    for column in ("nobody looks", "looked at", "change", "least to most", "GetPool", "ListBlocks"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{watched.quiet:.2f}",
        f"{watched.watched:.2f}",
        f"{watched.change:+.1%}",
        f"{min(watched.changes):+.1%} to {max(watched.changes):+.1%}",
        str(watched.pools_read),
        str(watched.dumps_read),
    )
    console.print(table)


def show_dumped(dumped: Dumped, console: Console) -> None:
    """Print the second part for people."""
    table = Table(title=f"the memory manager alone, {dumped.blocks:,} blocks: milliseconds between two steps")
    for column in ("", "median", "longest"):
        table.add_column(column, justify="right")
    table.add_row("quiet", f"{dumped.median_quiet_ms:.2f}", f"{dumped.longest_quiet_ms:.1f}")
    dumping = f"during dumps of {dumped.dump_seconds:.1f} s"
    table.add_row(dumping, f"{dumped.median_dumping_ms:.2f}", f"{dumped.longest_dumping_ms:.1f}")
    console.print(table)


@click.command(help=help_of(__doc__), context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of tables.")
@click.option("--seconds", type=Seconds(1, 300), default=20.0, show_default=True, help="Of each arm of the first part.")
@click.option("--part", type=click.Choice(["both", "watch", "dump"]), default="both", show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(as_json: bool, seconds: float, part: str, flags: Sequence[str]) -> None:
    """See the module."""
    processors = Processors.ours()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        watched = watch(seconds, flags, processors, progress) if part != "dump" else None
        dumped = dump(processors, progress) if part != "watch" else None
    if as_json:
        parts = {"watched": watched and asdict(watched), "dumped": dumped and asdict(dumped)}
        json.dump(parts, sys.stdout)
        print()
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    if watched is not None:
        show_watched(watched, console)
    if dumped is not None:
        show_dumped(dumped, console)


if __name__ == "__main__":
    main()
