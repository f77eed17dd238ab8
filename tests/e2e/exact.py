"""The full comparison with `transformers`: every prompt, every way of sending, every block size, small pools, poison.

    python -m tests.e2e.exact [--block-size N ...]

Each system is started anew, with an ample pool and with the smallest one that holds the longest prompt, which can't go without
preemptions. The prompts go one at a time, all at once with an empty cache, and all at once again; then all at once with --poison,
where a number that nobody wrote is NaN. After every round nothing may be held. Then beam searches with 2, 4 and 6 beams on ten of
the prompts, one by one and all at once: the same hypotheses, scores within 1e-5. Ends at the first difference.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from executor.fetch import ensure_model
from kilburn.config import DEFAULT_MODEL
from tests.e2e import rounds
from tests.e2e.beam_oracle import NEW_TOKENS, Search
from tests.e2e.beams import DEFAULT_EOS, ask_beams, compare, read_expected_searches
from tests.e2e.corpus import Expected, read_expected
from tests.e2e.rounds import Round, Way
from tests.e2e.system import System

BLOCK_SIZES: Final = (1, 7, 16, 64)

_BEAM_BLOCKS: Final = 192  # of 16 tokens: too few for all of the searches at once


@dataclass(frozen=True, slots=True)
class Case:
    """One system and the rounds that it goes through."""

    block_size: int
    num_blocks: int
    small: bool
    poison: bool
    ways: tuple[Way, ...]


def cases(prompts: Sequence[Expected], block_sizes: Sequence[int]) -> Iterator[Case]:
    """Yield what is run, in order."""
    for block_size in block_sizes:
        ample = rounds.ample_pool(prompts, block_size)
        smallest = rounds.smallest_pool(prompts, block_size)
        yield Case(block_size, ample, False, False, ("alone", "together", "warm"))
        yield Case(block_size, smallest, True, False, ("alone", "together", "warm"))
        yield Case(block_size, ample, False, True, ("together", "warm"))
        yield Case(block_size, smallest, True, True, ("together", "warm"))


@click.command(help=__doc__)
@click.option("--block-size", "block_sizes", type=int, multiple=True, default=BLOCK_SIZES, show_default=True)
@click.option("--beams-only", is_flag=True, help="Compare beam searches alone.")
def main(block_sizes: tuple[int, ...], beams_only: bool) -> None:
    """Run all cases and print what was compared."""
    ensure_model(DEFAULT_MODEL)
    prompts = read_expected()
    todo = [] if beams_only else list(cases(prompts, block_sizes))
    searches = read_expected_searches()
    table = _table()
    console = Console()
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=sum(len(case.ways) for case in todo) + 2 * len(searches))
            for case in todo:
                progress.update(task, description=f"block size {case.block_size}, {case.num_blocks} blocks")
                for outcome, seconds in _run(case, prompts):
                    _add(table, case, outcome, seconds)
                    progress.advance(task)
            progress.update(task, description="beam searches")
            error = _compare_searches(searches, lambda: progress.advance(task))
    finally:
        if todo:
            console.print(table)
    if todo:
        console.print("every token as transformers has it; after every round nothing was held")
    console.print(
        f"{len(searches)} beam searches as transformers has them, one by one and all at once; scores within {error:.1e}"
    )


def _run(case: Case, prompts: Sequence[Expected]) -> Iterator[tuple[Round, float]]:
    """Yield each round of a case with its seconds."""
    preemptions = 0
    with System(rounds.flags(case.block_size, case.num_blocks, case.poison)) as system:
        for way in case.ways:
            begun = time.monotonic()
            # One domain of the cache for the round alone, one for the two together: the first of them finds nothing.
            outcome = rounds.run(system, prompts, way, salt="alone" if way == "alone" else "together")
            preemptions += outcome.preemptions
            if way == "warm" and not case.small:
                assert outcome.cached_tokens > 0, "a warm round that found nothing in the cache"
            yield outcome, time.monotonic() - begun
    assert preemptions > 0 or not case.small, "the small pool did without preemptions"


def _compare_searches(searches: Sequence[Search], advance: Callable[[], None]) -> float:
    """Run the searches one by one, then all at once; return the largest difference between two scores."""
    error = 0.0

    def run(search: Search) -> float:
        found = ask_beams(system, search.prompt_ids, search.width, NEW_TOKENS)
        error = compare(found, search.beams, DEFAULT_EOS)
        advance()
        return error

    with System(rounds.flags(16, _BEAM_BLOCKS)) as system:
        for search in searches:
            error = max(error, run(search))
        with ThreadPoolExecutor(len(searches)) as threads:
            error = max(error, *threads.map(run, searches))
        system.settled()
    return error


def _table() -> Table:
    table = Table("block size", "blocks", "poison", "sent", title="compared with transformers, float32, greedy")
    for name in ("prompts", "tokens", "cached", "preemptions", "log-probabilities", "largest error", "seconds"):
        table.add_column(name, justify="right")
    return table


def _add(table: Table, case: Case, outcome: Round, seconds: float) -> None:
    table.add_row(
        str(case.block_size),
        f"{case.num_blocks}{' (smallest)' if case.small else ''}",
        "yes" if case.poison else "",
        outcome.way,
        str(outcome.prompts),
        str(outcome.tokens),
        str(outcome.cached_tokens),
        str(outcome.preemptions),
        str(outcome.logprobs),
        f"{outcome.largest_error:.0e}",
        f"{seconds:.0f}",
    )


if __name__ == "__main__":
    main()
