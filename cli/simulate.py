"""`kilburn simulate`: a trace through the memory core and the scheduler with no model, as a table or as JSON."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.options import Parsed, WholeRange, whole_number
from kilburn.errors import StartError
from kilburn.limits import MAX_BLOCK_SIZE, MAX_SAMPLES

if TYPE_CHECKING:
    from memmgr.simulate.beams import Parents
    from memmgr.simulate.saturated import Report
    from memmgr.simulate.traces import TraceRequest

_ALL: Final = "all"
_POLICIES: Final = ("paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle")

#: The pool of Kwon et al. (2023): 15,700 slots, in blocks of 16.
_NUM_BLOCKS: Final = 981
_BLOCK_SIZE: Final = 16

#: A pool of terabytes; the simulation takes a GiB for it.
_MAX_BLOCKS: Final = 10_000_000

_MAX_COUNT: Final = 2**31 - 1

#: Of the recorded searches, memmgr/simulate/beam_parents.json, which are not read for a line of help.
BEAM_WIDTHS: Final = (2, 4, 6)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", type=click.Choice([*_POLICIES, _ALL]), default="paged", show_default=True, help="What a request takes.")
@click.option("--num-blocks", type=WholeRange(1, _MAX_BLOCKS), default=_NUM_BLOCKS, show_default=True, help="Of the pool.")
@click.option(
    "--block-size", type=WholeRange(1, MAX_BLOCK_SIZE), help="Tokens a block; else 16, or 512 for a trace with prefixes."
)
@click.option(
    "--max-model-len", type=WholeRange(2, _MAX_COUNT), help="Tokens, prompt and output; else the trace's longest request's."
)
@click.option("--max-running", type=WholeRange(1, 65536), default=256, show_default=True, help="Sequences in a step.")
@click.option("--max-step-tokens", type=WholeRange(1, _MAX_COUNT), default=2048, show_default=True, help="Budget of a step.")
@click.option("--samples", type=WholeRange(1, MAX_SAMPLES), default=1, show_default=True, help="Outputs of each request.")
@click.option(
    "--beams",
    type=click.Choice(["1", *map(str, BEAM_WIDTHS)]),
    default="1",
    show_default=True,
    help="Width of a search, of those that were recorded; 1: none.",
)
@click.option("--prefix-cache/--no-prefix-cache", default=False, show_default=True, help="Share the blocks of equal prefixes.")
@click.option(
    "--one-by-one/--saturated",
    "one_by_one",
    default=None,
    help="Prompts alone, each done before the next, or a queue that never runs dry; "
    "else one by one for a trace with prefixes under --prefix-cache.",
)
@click.option("--limit", type=WholeRange(1), help="Only so many requests.")
@click.option("--seed", type=Parsed("integer", whole_number), help="Shuffle the trace; else it keeps its order.")
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of a table.")
def simulate(
    trace: Path,
    policy: str,
    num_blocks: int,
    block_size: int | None,
    max_model_len: int | None,
    max_running: int,
    max_step_tokens: int,
    samples: int,
    beams: str,
    prefix_cache: bool,
    one_by_one: bool | None,
    limit: int | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Run a trace through memory core and scheduler.

    TRACE is a file of ShareGPT's lengths (CSV), of Azure's trace of 2023 (CSV), or of Mooncake's traces (JSON lines), perhaps
    compressed with gzip. The queue is saturated, the executor answers at once. `--policy all` compares paged memory with
    reserving contiguous slots: up to the context length, up to the next power of two of the true output, or the true output.
    """
    if max_step_tokens < max_running:
        raise StartError(
            f"--max-step-tokens {max_step_tokens} is less than --max-running {max_running}: a step holds one of each"
        )
    if prefix_cache and policy != "paged":
        raise StartError(f"--prefix-cache goes with --policy paged: nothing is shared under --policy {policy}")
    beam_width = int(beams)
    for flag, width in ("--samples", samples), ("--beams", beam_width):
        if width > 1 and policy != "paged":
            raise StartError(f"{flag} goes with --policy paged: nothing is shared under --policy {policy}")
        if width > max_running:
            raise StartError(f"{flag} {width} is more than --max-running {max_running}: those of a request run together")
        if width > 1 and one_by_one:
            raise StartError(f"--one-by-one is about prompts alone: it does not go with {flag}")
    if samples > 1 and beam_width > 1:
        raise StartError("--samples or --beams, not both")
    if one_by_one and not prefix_cache:
        raise StartError("--one-by-one shows what a cache finds again: it needs --prefix-cache")
    searches = _searches(beam_width)
    from cli.simulated import progress, show_reports
    from memmgr.simulate.policies import Policy
    from memmgr.simulate.prefixes import simulate_one_by_one
    from memmgr.simulate.saturated import NeverFitsError, Setup
    from memmgr.simulate.saturated import simulate as run
    from memmgr.simulate.traces import MOONCAKE_BLOCK, TraceError, survey

    try:
        source = _source(trace, limit, seed)
        seen = survey(source())
        if one_by_one and not seen.has_prefixes:
            raise StartError(f"{trace}: the trace has no prefixes; --one-by-one needs them")
        size = block_size or (MOONCAKE_BLOCK if seen.has_prefixes else _BLOCK_SIZE)
        context = min(max_model_len or seen.longest, num_blocks * size)
        alone = prefix_cache and seen.has_prefixes and samples == beam_width == 1 if one_by_one is None else one_by_one
        reports: list[Report] = []
        with progress() as begin:
            for name in _POLICIES if policy == _ALL else (policy,):
                advance = begin(name, seen.requests)
                if alone:
                    reports.append(simulate_one_by_one(num_blocks, size, source(), advance))
                    continue
                setup = Setup(
                    Policy(name), num_blocks, size, context, max_running, max_step_tokens, prefix_cache, samples, searches
                )
                try:
                    reports.append(run(setup, source(), advance))
                except NeverFitsError as error:
                    if policy != _ALL:
                        raise
                    click.echo(str(error), err=True)
        if not reports:
            raise StartError("no request fits under any policy")
    except (TraceError, NeverFitsError) as error:
        raise StartError(str(error)) from error
    for report in reports:
        if report.refused:
            left_out = "1 request is" if report.refused == 1 else f"{report.refused:,} requests are"
            click.echo(f"{report.policy}: {left_out} longer than context or pool, left out", err=True)
    if as_json:
        plain = [as_plain(report) for report in reports]
        if samples == beam_width == 1:
            for one in plain:
                del one["shared_saving"]
        json.dump({"policies": plain} if policy == _ALL else plain[0], sys.stdout)
        click.echo()
        return
    ran = max(report.requests for report in reports)
    requests = f"{ran:,} requests" if ran == seen.requests else f"{ran:,} of {seen.requests:,} requests"
    blocks = "1 block" if num_blocks == 1 else f"{num_blocks:,} blocks"
    show_reports(reports, f"{requests} of {trace.name}, {blocks} of {size}, context {context:,}")
    if alone:
        from cli.simulated import show_bounds
        from memmgr.simulate.eviction import bound, unbounded
        from memmgr.simulate.prefixes import granule, prompts_of

        inner = size // granule(size)
        prompts = [prompt for prompt in prompts_of(source(), size) if len(prompt.tokens) <= num_blocks * inner]
        show_bounds(bound(prompts, inner, num_blocks).rate, unbounded(prompts, inner).rate)


def as_plain(report: Report) -> dict[str, object]:
    """Return a report as the object that programs read."""
    plain = asdict(report)
    del plain["refused"]
    return plain


def _searches(width: int) -> tuple[Parents, ...]:
    """Return the recorded beam searches of a width; none for 1."""
    from memmgr.simulate.beams import recorded

    if width == 1:
        return ()
    return recorded()[width]


def _source(trace: Path, limit: int | None, seed: int | None) -> Callable[[], Iterable[TraceRequest]]:
    """Return what begins to read the trace anew: from the file, or from a list where it is shuffled or can't be read twice."""
    from memmgr.simulate.traces import read_trace

    if seed is None and trace.is_file():
        return lambda: islice(read_trace(trace), limit)
    requests = list(read_trace(trace) if seed is not None else islice(read_trace(trace), limit))
    if seed is not None:
        random.Random(seed).shuffle(requests)  # noqa: S311 - an order, no secret
        del requests[limit:]
    return lambda: requests
