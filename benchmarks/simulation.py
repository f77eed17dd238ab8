"""What paging is worth, from published traces, with no model: the four policies, the block sizes, the prefixes found again.

    python -m benchmarks.simulation --data FOLDER [--json] [--svg FILE] [--limit REQUESTS]

1. ShareGPT's lengths in 15,700 slots, as in Figure 2 of Kwon et al. (2023): what the slots were good for under each policy, and
   how many requests ran at once.
2. The same lengths, paged, in blocks of 1 to 256 tokens: slots wasted, against entries of the block tables.
3. Mooncake's prompts one by one: the share of their blocks that caches of several sizes find, evicting by recency (the core's
   order) and by other orders, beside what no order could beat and what a cache finds that never forgets.

All requests take about five minutes on one core; --limit takes the first of each trace, and the means get rougher.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cli.simulated import show_reports
from memmgr.core.memory import Memory
from memmgr.simulate.eviction import BriefFrequencyMemory, FrequencyMemory, bound, unbounded
from memmgr.simulate.policies import Policy
from memmgr.simulate.prefixes import Prompt, cache, granule, prompts_of
from memmgr.simulate.saturated import Report, Setup, simulate
from memmgr.simulate.traces import MOONCAKE_BLOCK, TraceError, TraceRequest, read_trace

_LENGTHS: Final = "sharegpt_lengths.csv.gz"
_PREFIXES: Final = ("mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz")

#: Of Kwon et al.: 15,700 slots, OPT's context.
_NUM_BLOCKS: Final = 981
_BLOCK_SIZE: Final = 16
_CONTEXT: Final = 2048
_MAX_RUNNING: Final = 256
_MAX_STEP_TOKENS: Final = 2048

_BLOCK_SIZES: Final = (1, 4, 8, 16, 32, 64, 128, 256)
_CACHE_SIZES: Final = (1_000, 5_000, 10_000, 50_000)
_ORDERS: Final[dict[str, type[Memory]]] = {
    "recency": Memory,
    "recency and frequency": FrequencyMemory,
    "the same, no ghosts": BriefFrequencyMemory,
}

#: An entry of a block table, as kernels read it.
_ENTRY_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Paged memory in blocks of one size. Shares are of all slots; entries are of one running sequence's table, on average."""

    block_size: int
    wasted: float  # in blocks that a sequence holds: reserved and internal fragmentation
    free: float
    mean_running: float
    table_entries: float
    table_bytes: float


@dataclass(frozen=True, slots=True)
class HitRates:
    """The share of blocks that one trace's prompts find in a cache of so many, by order of eviction."""

    trace: str
    num_blocks: int
    orders: dict[str, float]
    bound: float
    unbounded: float


def _mover(progress: Progress, name: str, total: int) -> Callable[[int], None]:
    task = progress.add_task(name, total=total)
    return lambda done: progress.update(task, completed=done)


def policies(trace: Sequence[TraceRequest], progress: Progress) -> list[Report]:
    """Run the lengths under each policy."""
    reports = []
    for policy in Policy:
        setup = Setup(policy, _NUM_BLOCKS, _BLOCK_SIZE, _CONTEXT, _MAX_RUNNING, _MAX_STEP_TOKENS)
        reports.append(simulate(setup, trace, _mover(progress, policy, len(trace))))
    return reports


def block_sizes(trace: Sequence[TraceRequest], progress: Progress) -> list[BlockSize]:
    """Run the lengths, paged, in blocks of each size."""
    points = []
    for size in _BLOCK_SIZES:
        setup = Setup(Policy.PAGED, _NUM_BLOCKS * _BLOCK_SIZE // size, size, _CONTEXT, _MAX_RUNNING, _MAX_STEP_TOKENS)
        report = simulate(setup, trace, _mover(progress, f"blocks of {size}", len(trace)))
        entries = (1 - report.free) * setup.num_blocks / max(report.mean_running, 1e-9)
        wasted = report.reserved + report.internal_fragmentation
        points.append(BlockSize(size, wasted, report.free, report.mean_running, entries, entries * _ENTRY_BYTES))
    return points


def hit_rates(name: str, prompts: Sequence[Prompt], progress: Progress) -> list[HitRates]:
    """Run one trace's prompts through caches of each size, by each order."""
    size = MOONCAKE_BLOCK // granule(MOONCAKE_BLOCK)
    whole = unbounded(prompts, size).rate
    points = []
    task = progress.add_task(name, total=len(_CACHE_SIZES) * len(_ORDERS))
    for num_blocks in _CACHE_SIZES:
        rates = {}
        for order, kind in _ORDERS.items():
            runner = cache(num_blocks, MOONCAKE_BLOCK, kind)
            for prompt in prompts:
                runner.run(prompt)
            rates[order] = runner.hits.rate
            progress.advance(task)
        points.append(HitRates(name, num_blocks, rates, bound(prompts, size, num_blocks).rate, whole))
    return points


def show(reports: Sequence[Report], sizes: Sequence[BlockSize], rates: Sequence[HitRates], console: Console) -> None:
    """Print the three tables."""
    show_reports(reports, f"ShareGPT's lengths in {_NUM_BLOCKS} blocks of {_BLOCK_SIZE}, context {_CONTEXT:,}", console)
    table = Table(title="\npaged, by block size", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("tokens a block", "unused in held blocks", "free", "running", "table entries", "bytes"):
        table.add_column(column, justify="right")
    for size in sizes:
        shares = (f"{size.wasted:.2%}", f"{size.free:.2%}", f"{size.mean_running:.1f}")
        table.add_row(str(size.block_size), *shares, f"{size.table_entries:.1f}", f"{size.table_bytes:.0f}")
    console.print(table)
    table = Table(title="\nblocks of prompts found, one by one", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("trace", "blocks", *_ORDERS, "no order beats", "never forgetting"):
        table.add_column(column, justify="left" if column == "trace" else "right")
    for rate in rates:
        found = (*rate.orders.values(), rate.bound, rate.unbounded)
        table.add_row(rate.trace.split(".")[0], f"{rate.num_blocks:,}", *(f"{one:.1%}" for one in found))
    console.print(table)


@click.command(help=__doc__)
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Where the traces lie."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of tables.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the tables and bars as a picture, too.")
@click.option("--limit", type=click.IntRange(1), help="Only so many requests of each trace.")
def main(data: Path, as_json: bool, svg: Path | None, limit: int | None) -> None:
    """See the module."""
    try:
        lengths = list(islice(read_trace(data / _LENGTHS), limit))
        prompts = {name: list(prompts_of(islice(read_trace(data / name), limit), MOONCAKE_BLOCK)) for name in _PREFIXES}
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rates = [rate for name, asked in prompts.items() for rate in hit_rates(name, asked, progress)]
        reports = policies(lengths, progress)
        sizes = block_sizes(lengths, progress)
    if as_json:
        plain = {
            "policies": [asdict(report) for report in reports],
            "block_sizes": [asdict(size) for size in sizes],
            "hit_rates": [asdict(rate) for rate in rates],
        }
        json.dump(plain, sys.stdout)
        print()
    else:
        show(reports, sizes, rates, Console(width=None if sys.stdout.isatty() else 160, highlight=False))
    if svg is not None:
        with Path(os.devnull).open("w") as nowhere:
            picture = Console(width=150, record=True, file=nowhere, force_terminal=True, highlight=False)
            show(reports, sizes, rates, picture)
            picture.save_svg(str(svg), title="kilburn: memory under four policies")


if __name__ == "__main__":
    main()
