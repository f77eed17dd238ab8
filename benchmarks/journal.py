"""What the journal costs: a step's planning and applying with it and without, bytes an operation, and how fast it is replayed.

    python -m benchmarks.journal [--json] [--running 8 --running 64]

Scheduler and memory alone, with an executor that answers at once: prompts of which half is shared, decoded to their end, so many
at a time. What is measured is the processor time of the engine's thread; the file is written as the engine does, once a step. A
server's step has the executor's time and the wire's on top, and most of this while the executor computes (`benchmarks.steps`).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import structlog
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.options import help_of
from memmgr.core.lineage import root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import MemoryCounters
from memmgr.journal.files import JournalFile
from memmgr.journal.journaled import memory_of
from memmgr.journal.recording import Journal
from memmgr.journal.replaying import Replay, replay
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import Limits, Sampled, Submission
from memmgr.schedule.scheduler import Scheduler

_PROMPT_TOKENS: Final = 256
_OUTPUT_TOKENS: Final = 128
_REQUESTS_EACH: Final = 4  # for each that runs at once
_VOCABULARY: Final = 50_000
_BLOCK_SIZE: Final = 16
_ROUNDS: Final = 7
_CHECK_EVERY: Final = 200  # operations


@dataclass(frozen=True, slots=True)
class Point:
    """One number of running sequences; milliseconds a step are medians of the rounds."""

    running: int
    blocks: int
    steps: int
    off_ms: float
    on_ms: float
    ratio: float  # the median of the rounds' ratios
    operations: int
    bytes_per_operation: float
    bytes_per_token: float  # computed: of prompts and outputs
    replay_operations_per_second: float  # without checking
    check_ms: float  # one check of all invariants


def _serve(memory: Memory, journal: Journal | None, running: int, seed: int) -> tuple[int, int, float]:
    """Have all requests answered. Returns steps, tokens computed, seconds of processor time."""
    limits = Limits(running, running * _REQUESTS_EACH, max(2048, running), _PROMPT_TOKENS + _OUTPUT_TOKENS)
    counters = ScheduleCounters()
    scheduler = Scheduler(memory, limits, lambda tenant, salt: root_hash("model", tenant, salt), counters)
    chance = random.Random(seed)  # noqa: S311 - prompts, not secrets
    shared = [chance.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS // 2)]
    for number in range(running * _REQUESTS_EACH):
        prompt = array("I", shared + [chance.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS // 2)])
        scheduler.submit(Submission((0, number), "tenant", str(number), prompt, None, _OUTPUT_TOKENS, frozenset()), 0.0)
    tokens = 0
    answers = [Sampled(chance.randrange(_VOCABULARY)) for _ in range(running)]
    began = time.thread_time()
    while (plan := scheduler.plan(counters.planned_steps / 100)) is not None:
        tokens += sum(chunk.count for chunk in plan.chunks)
        if journal is not None:
            journal.flush()
        scheduler.complete(plan.step, answers[: len(plan.samples)], counters.planned_steps / 100)
        scheduler.take_events()
    return counters.planned_steps, tokens, time.thread_time() - began


def measure(running: int, folder: Path) -> Point:
    """Measure one number of running sequences."""
    blocks = running * (_PROMPT_TOKENS + _OUTPUT_TOKENS) // _BLOCK_SIZE
    path = folder / f"{running}.journal"
    off: list[float] = []
    on: list[float] = []
    steps = tokens = 0
    for seed in track(range(_ROUNDS), f"{running} running", console=Console(stderr=True), transient=True):
        memory = Memory(blocks, _BLOCK_SIZE, prefix_cache=True, counters=MemoryCounters())
        steps, _, seconds = _serve(memory, None, running, seed)
        off.append(seconds / steps)
        path.unlink(missing_ok=True)
        journal = Journal(JournalFile(path), structlog.get_logger(), 0.0)
        memory = memory_of(journal, blocks, _BLOCK_SIZE, prefix_cache=True, counters=MemoryCounters())
        steps, tokens, seconds = _serve(memory, journal, running, seed)
        journal.close(ended=True)
        on.append(seconds / steps)
    began = time.thread_time()
    summary = replay(path, Replay(check_every=10**9))
    unchecked = time.thread_time() - began
    began = time.thread_time()
    replay(path, Replay(_CHECK_EVERY))
    checked = time.thread_time() - began
    return Point(
        running=running,
        blocks=blocks,
        steps=steps,
        off_ms=statistics.median(off) * 1e3,
        on_ms=statistics.median(on) * 1e3,
        ratio=statistics.median(b / a for a, b in zip(off, on, strict=True)),
        operations=summary.operations,
        bytes_per_operation=summary.bytes / summary.operations,
        bytes_per_token=summary.bytes / tokens,
        replay_operations_per_second=summary.operations / unchecked,
        check_ms=(checked - unchecked) / (summary.operations // _CHECK_EVERY) * 1e3,
    )


def show(points: Sequence[Point], console: Console) -> None:
    """Print the table for people."""
    table = Table(title="planning and applying one step, milliseconds")
    columns = (
        "running",
        "blocks",
        "steps",
        "off",
        "on",
        "ratio",
        "bytes/operation",
        "bytes/token",
        "replayed/s",
        "one check, ms",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            *(f"{number:,}" for number in (point.running, point.blocks, point.steps)),
            *(f"{number:.3f}" for number in (point.off_ms, point.on_ms, point.ratio)),
            *(f"{number:.2f}" for number in (point.bytes_per_operation, point.bytes_per_token)),
            f"{point.replay_operations_per_second:,.0f}",
            f"{point.check_ms:.2f}",
        )
    console.print(table)


@click.command(help=help_of(__doc__))
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of a table.")
@click.option("--running", "counts", type=click.IntRange(1, 1024), multiple=True, default=(1, 8, 32, 128), show_default=True)
def main(as_json: bool, counts: Sequence[int]) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory(prefix="kilburn-bench-") as folder:
        points = [measure(count, Path(folder)) for count in counts]
    if as_json:
        json.dump({"points": [asdict(point) for point in points]}, sys.stdout)
        print()
    else:
        show(points, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
