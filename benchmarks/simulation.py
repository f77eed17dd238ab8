"""What paging is worth, from published traces, with no model: the four policies, block sizes, sharing, prefixes found again.

    python -m benchmarks.simulation --data FOLDER [--json] [--svg FILE] [--limit REQUESTS] [--only PART ...]

policies      ShareGPT's lengths in 15,700 slots, as in Figure 2 of Kwon et al. (2023): what the slots were good for under each
              policy, and how many requests ran at once. `--svg` draws them. Paged, no sequence may hold a whole block unused.
block-sizes   The same lengths, paged, in blocks of 1 to 256 tokens: slots wasted, against entries of the block tables.
sharing       Blocks that 2, 4 and 6 samples and beams of each prompt save, at lengths like Alpaca's and at ShareGPT's.
prefixes      Mooncake's prompts one by one: the share of their blocks that caches of several sizes find, evicting by recency (the
              core's order once) and by other orders, beside what no order could beat and what a cache finds that never forgets.
segments      The same, by the core's order with other parts of the pool for what was used twice, and other numbers of evicted
              names remembered for each block; the last one is the default.

All of it takes some fifteen minutes on one core; --limit takes the first of each trace, and the means get rougher.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from benchmarks import sharing
from benchmarks.figure import Bar, stacked_bars
from benchmarks.options import check_writable, help_of, write
from benchmarks.sharing import Begin, Saving
from cli.simulated import progress, show_reports
from memmgr.core.memory import Memory
from memmgr.core.table import DEFAULT_ORDER
from memmgr.simulate.eviction import BriefFrequencyMemory, FrequencyMemory, RecencyMemory, bound, segmented, unbounded
from memmgr.simulate.policies import Policy
from memmgr.simulate.prefixes import Prompt, cache, granule, prompts_of
from memmgr.simulate.saturated import Report, Setup, simulate
from memmgr.simulate.traces import MOONCAKE_BLOCK, TraceError, TraceRequest, read_trace

_LENGTHS: Final = "sharegpt_lengths.csv.gz"
_POLICIES_PART: Final = "policies"
_SIZES_PART: Final = "block-sizes"
_SHARING_PART: Final = "sharing"
_PREFIXES_PART: Final = "prefixes"
_SEGMENTS_PART: Final = "segments"
_PARTS: Final = (_POLICIES_PART, _SIZES_PART, _SHARING_PART, _PREFIXES_PART, _SEGMENTS_PART)

_PREFIXES: Final = ("mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz")

#: Of Kwon et al.: 15,700 slots, OPT's context.
_NUM_BLOCKS: Final = 981
_BLOCK_SIZE: Final = 16
_CONTEXT: Final = 2048
_MAX_RUNNING: Final = 256
_MAX_STEP_TOKENS: Final = 2048

_BLOCK_SIZES: Final = (1, 4, 8, 16, 32, 64, 128, 256)
_CACHE_SIZES: Final = (1_000, 5_000, 10_000, 50_000)
Orders = dict[str, type[Memory]]
_ORDERS: Final[Orders] = {
    "recency": RecencyMemory,
    "the default": Memory,
    "recency and frequency": FrequencyMemory,
    "the same, no ghosts": BriefFrequencyMemory,
}
_SEGMENTS: Final[Orders] = {
    "recency": RecencyMemory,
    "half, no names": segmented(0.5, 0),
    "half, 1": segmented(0.5, 1),
    "half, 4": segmented(0.5, 4),
    "80 %, 4": segmented(0.8, 4),
    f"{DEFAULT_ORDER.proven_share:.0%}, {DEFAULT_ORDER.names}".replace("%", " %"): Memory,
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


@dataclass(slots=True)
class Results:
    """What was measured; empty where it was not asked for."""

    policies: list[Report] = field(default_factory=list)
    block_sizes: list[BlockSize] = field(default_factory=list)
    sharing: list[Saving] = field(default_factory=list)
    hit_rates: list[HitRates] = field(default_factory=list)
    segments: list[HitRates] = field(default_factory=list)

    def as_plain(self) -> dict[str, object]:
        """Return them as the object that programs read."""
        whole: dict[str, list[object]] = {
            "policies": list(self.policies),
            "block_sizes": list(self.block_sizes),
            "sharing": list(self.sharing),
            "hit_rates": list(self.hit_rates),
            "segments": list(self.segments),
        }
        return {name: [asdict(one) for one in found] for name, found in whole.items() if found}  # type: ignore[call-overload]


def policies(trace: Sequence[TraceRequest], begin: Begin) -> list[Report]:
    """Run the lengths under each policy."""
    reports = []
    for policy in Policy:
        setup = Setup(policy, _NUM_BLOCKS, _BLOCK_SIZE, _CONTEXT, _MAX_RUNNING, _MAX_STEP_TOKENS)
        reports.append(simulate(setup, trace, begin(policy, len(trace))))
    return reports


def block_sizes(trace: Sequence[TraceRequest], begin: Begin) -> list[BlockSize]:
    """Run the lengths, paged, in blocks of each size."""
    points = []
    for size in _BLOCK_SIZES:
        setup = Setup(Policy.PAGED, _NUM_BLOCKS * _BLOCK_SIZE // size, size, _CONTEXT, _MAX_RUNNING, _MAX_STEP_TOKENS)
        report = simulate(setup, trace, begin(f"blocks of {size}", len(trace)))
        entries = (1 - report.free) * setup.num_blocks / max(report.mean_running, 1e-9)
        wasted = report.reserved + report.internal_fragmentation
        points.append(BlockSize(size, wasted, report.free, report.mean_running, entries, entries * _ENTRY_BYTES))
    return points


def hit_rates(name: str, prompts: Sequence[Prompt], orders: Orders, begin: Begin) -> list[HitRates]:
    """Run one trace's prompts through caches of each size, by each order."""
    size = MOONCAKE_BLOCK // granule(MOONCAKE_BLOCK)
    whole = unbounded(prompts, size).rate
    points = []
    moved, done = begin(name, len(_CACHE_SIZES) * len(orders)), 0
    for num_blocks in _CACHE_SIZES:
        rates = {}
        for order, kind in orders.items():
            runner = cache(num_blocks, MOONCAKE_BLOCK, kind)
            for prompt in prompts:
                runner.run(prompt)
            rates[order] = runner.hits.rate
            done += 1
            moved(done)
        points.append(HitRates(name, num_blocks, rates, bound(prompts, size, num_blocks).rate, whole))
    return points


def running_table(reports: Sequence[Report]) -> Table:
    """Return how many requests ran at once under each policy, and how many times as many under the first."""
    first = reports[0]
    table = Table(title="\nrequests at once", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("policy", "running", f"{first.policy} runs"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for report in reports:
        table.add_row(report.policy, f"{report.mean_running:.1f}", f"{first.mean_running / max(report.mean_running, 1e-9):.2f} x")
    return table


def hits_table(rates: Sequence[HitRates], title: str) -> Table:
    """Return what was found, by trace, size and order."""
    table = Table(title=f"\n{title}", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("trace", "blocks", *rates[0].orders, "no order beats", "never forgetting"):
        table.add_column(column, justify="left" if column == "trace" else "right")
    for rate in rates:
        found = (*rate.orders.values(), rate.bound, rate.unbounded)
        table.add_row(rate.trace.split(".")[0], f"{rate.num_blocks:,}", *(f"{one:.1%}" for one in found))
    return table


def show(results: Results, console: Console) -> None:
    """Print the tables of what there is."""
    if results.policies:
        title = f"ShareGPT's lengths in {_NUM_BLOCKS} blocks of {_BLOCK_SIZE}, context {_CONTEXT:,}"
        show_reports(results.policies, title, console)
        console.print(running_table(results.policies))
        console.print(f"\npaged, no sequence ever held more than {results.policies[0].max_waste_tokens} slots unused")
    if results.block_sizes:
        table = Table(title="\npaged, by block size", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("tokens a block", "unused in held blocks", "free", "running", "table entries", "bytes"):
            table.add_column(column, justify="right")
        for size in results.block_sizes:
            shares = (f"{size.wasted:.2%}", f"{size.free:.2%}", f"{size.mean_running:.1f}")
            table.add_row(str(size.block_size), *shares, f"{size.table_entries:.1f}", f"{size.table_bytes:.0f}")
        console.print(table)
    if results.sharing:
        sharing.show(results.sharing, console)
    if results.hit_rates:
        console.print(hits_table(results.hit_rates, "blocks of prompts found, one by one"))
    if results.segments:
        title = "the same, by the part of the pool for what was used twice, and the names remembered for each block"
        console.print(hits_table(results.segments, title))


def picture(reports: Sequence[Report]) -> str:
    """Return the policies' shares as a bar chart."""
    bars = []
    for report in reports:
        wasted = (report.reserved, report.internal_fragmentation, report.external_fragmentation)
        shares = (report.utilization, *wasted, report.free)
        bars.append(Bar(report.policy, f"{report.mean_running:.1f} at once", shares))
    return stacked_bars(bars, f"ShareGPT's lengths in {_NUM_BLOCKS * _BLOCK_SIZE:,} slots of KV cache", "share of slots, %")


@click.command(help=help_of(__doc__))
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Where the traces lie."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of tables.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw the policies' shares into this file, too.")
@click.option("--limit", type=click.IntRange(1), help="Only so many requests of each trace.")
@click.option("--only", "parts", type=click.Choice(_PARTS), multiple=True, help="This part; may be repeated. Else all.")
def main(data: Path, as_json: bool, svg: Path | None, limit: int | None, parts: tuple[str, ...]) -> None:
    """See the module."""
    wanted = parts or _PARTS
    if svg is not None and _POLICIES_PART not in wanted:
        raise click.UsageError(f"--svg draws the policies: it needs --only {_POLICIES_PART}")
    if svg is not None:  # all of it takes a quarter of an hour
        check_writable(svg, "--svg")
    results = Results()
    try:
        of_prefixes = {_PREFIXES_PART, _SEGMENTS_PART}
        lengths = list(islice(read_trace(data / _LENGTHS), limit)) if set(wanted) - of_prefixes else []
        names = _PREFIXES if of_prefixes & set(wanted) else ()
        prompts = {name: list(prompts_of(islice(read_trace(data / name), limit), MOONCAKE_BLOCK)) for name in names}
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    with progress() as begin:
        if _POLICIES_PART in wanted:
            results.policies = policies(lengths, begin)
        if _SIZES_PART in wanted:
            results.block_sizes = block_sizes(lengths, begin)
        if _SHARING_PART in wanted:
            results.sharing = sharing.savings(lengths, limit, begin)
        if _PREFIXES_PART in wanted:
            results.hit_rates = [rate for name, asked in prompts.items() for rate in hit_rates(name, asked, _ORDERS, begin)]
        if _SEGMENTS_PART in wanted:
            results.segments = [rate for name, asked in prompts.items() for rate in hit_rates(name, asked, _SEGMENTS, begin)]
    if as_json:
        json.dump(results.as_plain(), sys.stdout)
        print()
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 160, highlight=False))
    if svg is not None:
        write(svg, picture(results.policies))
    if results.policies and results.policies[0].max_waste_tokens >= _BLOCK_SIZE:
        raise click.ClickException("a sequence held a whole block unused")


if __name__ == "__main__":
    main()
