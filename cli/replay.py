"""`kilburn replay`: a journal run again, every invariant checked at each operation; a table of what was seen, or JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cli.options import WholeRange
from kilburn.errors import StartError

if TYPE_CHECKING:
    from memmgr.journal.summary import Summary

#: As in memmgr/journal/replaying.py, which is not imported for a line of help.
_MAX_BLOCKS: Final = 10_000_000
_MOST_BLOCKS: Final = 2**27


@click.command()
@click.argument("journal", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--check-every",
    type=WholeRange(1),
    default=1,
    show_default=True,
    help="Check the invariants after each so many operations: a check looks at the whole pool.",
)
@click.option(
    "--max-blocks",
    type=WholeRange(1, _MOST_BLOCKS),
    default=_MAX_BLOCKS,
    show_default=True,
    help="Replay no pool that is larger: it takes some 100 bytes a block.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of a table.")
def replay(journal: Path, check_every: int, max_blocks: int, as_json: bool) -> None:
    """Run a recorded journal again and check every invariant.

    JOURNAL is a file that `--journal` made, perhaps of several runs. Each operation must come to what it came to then. Exit
    status 0: all is well, also where the end of the file was cut off while it was written, which is told. 1: the first
    operation that went wrong, by its number, or the damage in the file.
    """
    from memmgr.journal.files import JournalError
    from memmgr.journal.replaying import Replay
    from memmgr.journal.replaying import replay as run

    if not journal.is_file():
        raise StartError(f"{journal}: this is no plain file")
    began = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task(journal.name, total=journal.stat().st_size)
            summary = run(journal, Replay(check_every, max_blocks), lambda done: bars.update(task, completed=done))
    except JournalError as error:
        raise JournalError(f"{journal}: {error}") from error
    except OSError as error:
        raise StartError(f"{journal}: {error.strerror}") from error
    seconds = time.monotonic() - began
    if as_json:
        json.dump({**asdict(summary), "check_every": check_every, "seconds": round(seconds, 3)}, sys.stdout)
        click.echo()
        return
    show(summary, journal, check_every, seconds)


def show(summary: Summary, journal: Path, check_every: int, seconds: float) -> None:
    """Print what was seen, and how the file ends."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    common = sorted(summary.kinds.items(), key=lambda item: -item[1])[:3]
    kinds = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in common)
    per_operation = summary.bytes / max(1, summary.operations)
    for name, value in {
        "operations": f"{summary.operations:,}",
        "steps": f"{summary.steps:,}",
        "sequences": f"{summary.sequences:,}",
        "preemptions": f"{summary.preemptions:,}",
        "blocks": f"{summary.blocks:,}",
        "live at most": f"{summary.peak_live:,}",
        "runs, pools": f"{summary.runs:,}, {summary.pools:,}",
        "checks": f"{summary.checks:,}",
        "bytes": f"{summary.bytes:,} ({per_operation:.1f} an operation)",
        "seconds": f"{seconds:.1f}",
    }.items():
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    if kinds:
        console.print(f"\nmost of them: {kinds}")
    if summary.killed:
        console.print(f"{summary.killed:,} of the runs before the last were killed")
    if summary.torn_bytes or (summary.runs and not summary.ended):
        place = "in the middle of the record" if summary.torn_bytes else "without an end"
        console.print(
            f"{journal.name} ends {place} behind operation {summary.operations:,}: the process was killed, or is still writing",
            soft_wrap=True,
        )
    where = "each operation" if check_every == 1 else f"each {check_every:,} operations"
    console.print(f"every operation came to what was recorded; all invariants hold, checked after {where}", soft_wrap=True)
