"""What several sequences of one prompt save by sharing blocks, as in Figure 15 of Kwon et al. (2023): samples, and beams.

Blocks saved, of those that there would be if no two tables shared one, over all steps. Samples go through the scheduler and fork
where the prompt ends; beams go on from the beams that a recorded search of the default model went on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from rich.console import Console
from rich.table import Table

from memmgr.simulate.beams import recorded
from memmgr.simulate.policies import Policy
from memmgr.simulate.saturated import Setup, simulate
from memmgr.simulate.synthetic import alpaca
from memmgr.simulate.traces import TraceRequest

_WIDTHS: Final = (2, 4, 6)

#: Of each trace. The first two thousand save as much as the first thousand, within a percentage point.
_REQUESTS: Final = 1000

#: As in benchmarks.simulation, but for the pool, which is never short: a request that was preempted comes back with its prompt
#: shared and its outputs each by itself, and what a beam search saves would be a matter of the pool.
_BLOCK_SIZE: Final = 16
_CONTEXT: Final = 2048
_MAX_RUNNING: Final = 256
_NUM_BLOCKS: Final = _MAX_RUNNING * _CONTEXT // _BLOCK_SIZE
_MAX_STEP_TOKENS: Final = 2048

#: What begins a bar of progress.
Begin = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True)
class Saving:
    """What sequences of one request save on one trace, by their number."""

    trace: str
    method: str
    saved: dict[int, float]


def savings(sharegpt: Sequence[TraceRequest], limit: int | None, begin: Begin) -> list[Saving]:
    """Measure samples and beams on lengths like Alpaca's, and on ShareGPT's."""
    count = min(_REQUESTS, limit or _REQUESTS)
    traces = {"Alpaca-like": list(alpaca(count)), "ShareGPT": list(islice(sharegpt, count))}
    searches = recorded()
    setup = Setup(Policy.PAGED, _NUM_BLOCKS, _BLOCK_SIZE, _CONTEXT, _MAX_RUNNING, _MAX_STEP_TOKENS)
    methods: dict[str, Callable[[int], Setup]] = {
        "samples": lambda width: replace(setup, samples=width),
        "beams": lambda width: replace(setup, searches=searches[width]),
    }
    found: list[Saving] = []
    for method, of_width in methods.items():
        for name, trace in traces.items():
            saved = {}
            for width in _WIDTHS:
                report = simulate(of_width(width), trace, begin(f"{name}, {width} {method}", len(trace)))
                assert report.preemptions == 0
                saved[width] = report.shared_saving
            found.append(Saving(name, method, saved))
    return found


def show(found: Sequence[Saving], console: Console) -> None:
    """Print the table."""
    table = Table(title="\nblocks saved by sharing", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("lengths")
    table.add_column("sequences of a request")
    for width in _WIDTHS:
        table.add_column(str(width), justify="right")
    for one in found:
        table.add_row(one.trace, one.method, *(f"{one.saved[width]:.1%}" for width in _WIDTHS))
    console.print(table)
