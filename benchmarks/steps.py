"""Where a step's time goes: planning, transport, forward pass, sampling, at 1, 8 and 32 running sequences.

    python -m benchmarks.steps [--json] [--running 1 --running 8] [-- FLAGS OF kilburn up]

Starts an instance and has so many sequences decode at once, through the gateway, past ends of sequence. What is measured lies
between the moment when the last of them has begun to stream and the moment when the first of them is nearly done: every step
decodes all of them. The parts are memmgr's own sums (Pool.step_totals), divided by the steps. Planning, applying and most of the
transport happen while the executor computes, so the parts need not add up to the step; what the executor waited for is `idle`.
"""

import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.options import help_of
from cli.instance import Instance, instance
from kilburn.client import AdminClient, Client
from kilburn.v1 import inference_pb2 as api
from kilburn.v1.admin_pb2 import Pool

_PROMPT_TOKENS: Final = 64
_OUTPUT_TOKENS: Final = 64

#: Tokens of each stream before the measurement begins, and before the end where it stops.
_MARGIN_TOKENS: Final = 8

_ROUNDS: Final = 3
_ROUND_TIMEOUT_SECONDS: Final = 300.0
_PARTS: Final = ("planning", "applying", "transport", "prepare", "forward", "sample", "idle")


@dataclass(frozen=True, slots=True)
class Point:
    """One number of running sequences; milliseconds a step, the median of the rounds."""

    running: int
    steps: int
    step_ms: float
    tokens_per_second: float
    parts_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Look:
    """memmgr's sums at one moment."""

    pool: Pool
    at: float


class _Round:
    """So many streams at once, and a look at the sums when all have begun and when the first is nearly done."""

    def __init__(self, running: Instance, count: int, vocab_size: int, seed: int) -> None:
        self._instance = running
        self._count = count
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._begun = 0
        self._first: _Look | None = None
        self._last: _Look | None = None
        self._errors: list[Exception] = []

    def run(self) -> tuple[_Look, _Look]:
        """Run the round. Returns the two looks."""
        prompts = [[self._random.randrange(self._vocab_size) for _ in range(_PROMPT_TOKENS)] for _ in range(self._count)]
        with Client(self._instance.gateway) as client, AdminClient(self._instance.admin) as admin:
            threads = [threading.Thread(target=self._stream, args=(client, admin, prompt), daemon=True) for prompt in prompts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_ROUND_TIMEOUT_SECONDS)
        if self._errors:
            raise self._errors[0]
        if self._first is None or self._last is None:
            raise click.ClickException("the streams did not overlap for long enough to measure anything")
        return self._first, self._last

    def _stream(self, client: Client, admin: AdminClient, prompt: Sequence[int]) -> None:
        request = api.GenerateRequest(
            token_ids=api.TokenIds(ids=prompt),
            sampling=api.Sampling(temperature=0),
            stopping=api.Stopping(max_tokens=_OUTPUT_TOKENS * 2, ignore_eos=True),
        )
        tokens, begun = 0, False
        try:
            stream = client.generate(request, _ROUND_TIMEOUT_SECONDS)
            for response in stream:
                tokens += len(response.token_ids)
                if not begun and tokens >= _MARGIN_TOKENS:
                    begun = True
                    self._begin(admin)
                if self._first is not None and tokens >= 2 * _OUTPUT_TOKENS - _MARGIN_TOKENS:
                    self._end(admin)
        except Exception as error:
            self._errors.append(error)

    def _begin(self, admin: AdminClient) -> None:
        with self._lock:
            self._begun += 1
            if self._begun == self._count:
                self._first = _Look(admin.pool(), time.monotonic())

    def _end(self, admin: AdminClient) -> None:
        with self._lock:
            if self._last is None:
                self._last = _Look(admin.pool(), time.monotonic())


def measure(running: Instance, count: int, progress: Progress) -> Point:
    """Measure one number of running sequences."""
    task = progress.add_task(f"{count} running", total=_ROUNDS)
    with Client(running.gateway) as client:
        vocab_size = client.model().vocab_size
    rounds: list[tuple[int, float, dict[str, float]]] = []
    for seed in range(_ROUNDS):
        first, last = _Round(running, count, vocab_size, seed).run()
        steps = last.pool.counters.steps - first.pool.counters.steps
        if steps < 1:
            raise click.ClickException("no step was made between the two looks")
        parts = {
            part: (getattr(last.pool.step_totals, f"{part}_ns") - getattr(first.pool.step_totals, f"{part}_ns")) / steps / 1e6
            for part in _PARTS
        }
        rounds.append((steps, (last.at - first.at) * 1e3 / steps, parts))
        progress.advance(task)
    step_ms = statistics.median(ms for _, ms, _ in rounds)
    return Point(
        running=count,
        steps=sum(steps for steps, _, _ in rounds),
        step_ms=step_ms,
        tokens_per_second=count * 1e3 / step_ms,
        parts_ms={part: statistics.median(parts[part] for _, _, parts in rounds) for part in _PARTS},
    )


def show(points: Sequence[Point], model: str, console: Console) -> None:
    """Print the table for people: milliseconds, and shares of the step."""
    table = Table(title=f"one decode step of {model}: milliseconds (share of the step)")
    for column in ("running", "steps", "step", *_PARTS, "tokens/s"):
        table.add_column(column, justify="right")
    for point in points:
        parts = [f"{point.parts_ms[part]:.2f} ({point.parts_ms[part] / point.step_ms:.1%})" for part in _PARTS]
        table.add_row(str(point.running), str(point.steps), f"{point.step_ms:.1f}", *parts, f"{point.tokens_per_second:.0f}")
    console.print(table)


@click.command(help=help_of(__doc__), context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of a table.")
@click.option("--running", "counts", type=click.IntRange(1, 256), multiple=True, default=(1, 8, 32), show_default=True)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(as_json: bool, counts: Sequence[int], flags: Sequence[str]) -> None:
    """See the module."""
    errors = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kilburn-bench-") as folder, instance(Path(folder) / "run", *flags) as running:
        with Progress(console=errors, transient=True) as progress:
            points = [measure(running, count, progress) for count in counts]
        model = running.model
    if as_json:
        json.dump({"model": model, "points": [asdict(point) for point in points]}, sys.stdout)
        print()
    else:
        show(points, model, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
