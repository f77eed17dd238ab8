"""Simulations for people: what the slots were good for, as a table with bars; and a progress bar while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from memmgr.simulate.saturated import Report

_BAR_CELLS: Final = 50

#: Share -> its name for people, its cell, its colour: cells differ where colours don't show.
_SHARES: Final = {
    "utilization": ("tokens", "█", "green"),
    "reserved": ("reserved", "▓", "yellow"),
    "internal_fragmentation": ("internal frag.", "▒", "red"),
    "external_fragmentation": ("external frag.", "░", "magenta"),
    "free": ("free", "·", "dim"),
}

#: The bar moves no more often than so many requests are done.
_STRIDE: Final = 8


def show_reports(reports: Sequence[Report], title: str, console: Console | None = None) -> None:
    """Print one line for each policy, and how many more run at once under the first."""
    console = console or _console()
    console.print(Text(title))
    for report in reports:
        if not report.mean_running:
            console.print(f"{report.policy}: no request ever waited; the shares are means over the steps in which one does")
    console.print()
    table = Table("policy", show_edge=False, pad_edge=False)
    for name, cell, colour in _SHARES.values():
        table.add_column(Text.assemble((f"{cell} ", colour), name), justify="right", no_wrap=True)
    for name in ("running", "steps", "preemptions", "most unused"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(
            report.policy,
            *(f"{getattr(report, share):.1%}" for share in _SHARES),
            f"{report.mean_running:.1f}",
            *(f"{number:,}" for number in (report.steps, report.preemptions, report.max_waste_tokens)),
        )
    console.print(table)
    console.print()
    for report in reports:
        console.print(
            Text.assemble(f"{report.policy:>17} ", bar([(getattr(report, share), *_SHARES[share][1:]) for share in _SHARES]))
        )
    first, *others = reports
    if first.block_hit_rate or first.evictions:
        console.print(f"\n{first.block_hit_rate:.1%} of the prompts' blocks were found; {first.evictions:,} blocks were evicted")
    if first.shared_saving:
        console.print(f"\nsharing saves {first.shared_saving:.1%} of the blocks that there would be if each sequence had its own")
    if others:
        times = ", ".join(f"{first.mean_running / max(other.mean_running, 1e-9):.1f} ({other.policy})" for other in others)
        console.print(f"\n{first.policy} runs so many times as many requests at once: {times}")


def show_bounds(bound: float, unbounded: float, console: Console | None = None) -> None:
    """Print what hit rates are to be compared with."""
    (console or _console()).print(
        f"no order of eviction could have found more than {bound:.1%}; a cache that never forgets finds {unbounded:.1%}"
    )


def bar(parts: Sequence[tuple[float, str, str]], cells: int = _BAR_CELLS) -> Text:
    """Return shares as one bar, each as (share, cell, colour)."""
    text, total = Text(), 0.0
    for share, cell, colour in parts:
        filled = round(total * cells)
        total += share
        text.append(cell * (round(total * cells) - filled), colour)
    return text


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Show progress on standard error, where that is a terminal. Gives what begins a bar, which gives what moves it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def begin(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total)

            def move(done: int) -> None:
                if done % _STRIDE == 0 or done == total:
                    bars.update(task, completed=done)

            return move

        yield begin


def _console() -> Console:
    console = Console(highlight=False)
    # What is no terminal has no width: a row stays on its line.
    return console if console.is_terminal else Console(highlight=False, width=1000)
