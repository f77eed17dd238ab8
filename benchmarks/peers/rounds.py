"""Who does what when: all systems take turns at each case, every second round in the opposite order, with new prompts each round.

Knows the cases and asks the systems; what comes of the numbers is `report`'s. The first round is not counted: it warms, and shows
whether all of them compute the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from benchmarks.peers.cases import OURS, SHARING, UNCACHED, VLLM, Case, Prompts, Sharing
from benchmarks.peers.systems import MeasureError, Run

#: Of all first tokens of the round that is not counted, so many are ours at least. In bfloat16 some differ; another model's, or
#: another rotation's, are all different.
_LEAST_AGREEMENT: Final = 0.5


class Runs(Protocol):
    """What does requests: `systems.Systems`."""

    def run(self, name: str, prompts: Sequence[Sequence[int]], outputs: int) -> Run:
        """Have a system do requests."""


@dataclass(frozen=True, slots=True)
class CaseRun:
    """A case, done by a system, in a round."""

    round: int
    case: str
    system: str
    seconds: float
    waiting: float
    foreign: float
    first_ids: list[int]  # the first output token of each request


@dataclass(frozen=True, slots=True)
class SharingRound:
    """One round of the system prompt's users. Seconds of all users at once; None where the system is left out."""

    round: int
    cold_seconds: float  # ours, the system prompt not seen before
    warm_seconds: float  # ours, the system prompt cached
    uncached_seconds: float  # ours without a prefix cache
    vllm_seconds: float | None  # the system prompt cached
    first_warm_seconds: list[float]  # one user alone, the system prompt cached: to the first token
    first_cold_seconds: list[float]  # one prompt of a question's length alone: to the first token
    waiting: list[float]  # of all of these, see systems.Run
    foreign: list[float]


@dataclass(slots=True)
class Found:
    """All that was measured; round 0 is not counted."""

    cases: list[CaseRun] = field(default_factory=list)
    sharing: list[SharingRound] = field(default_factory=list)


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def case_round(
    systems: Runs,
    names: Sequence[str],
    cases: Sequence[Case],
    prompts: Prompts,
    number: int,
    found: Found,
    tell: Callable[[], None],
) -> None:
    """Have all of `names` do all cases once; `tell` is called after each.

    Raises:
        MeasureError: one does not do it.
    """
    for case in cases:
        asked = prompts.fresh(case.requests, case.prompt)
        for name in turns(names, number):
            run = systems.run(name, asked, case.outputs)
            _check_cached(name, run, [0] * case.requests)
            first = [answer.ids[0] for answer in run.answers]
            found.cases.append(CaseRun(number, case.name, name, run.seconds, run.waiting, run.foreign, first))
            tell()


def agreement(runs: Sequence[CaseRun]) -> dict[str, float]:
    """Return for each peer how many of its first tokens are ours, of all requests that both did."""
    ours = {(run.round, run.case): run.first_ids for run in runs if run.system == OURS}
    same: dict[str, list[bool]] = {}
    for run in runs:
        if run.system != OURS:
            pairs = zip(run.first_ids, ours[run.round, run.case], strict=True)
            same.setdefault(run.system, []).extend(one == other for one, other in pairs)
    return {name: sum(equal) / len(equal) for name, equal in same.items()}


def check_agreement(runs: Sequence[CaseRun]) -> None:
    """Insist that all compute the same model.

    Raises:
        MeasureError: one does not.
    """
    for name, share in agreement(runs).items():
        if share < _LEAST_AGREEMENT:
            raise MeasureError(f"{name} computes something else: of its first tokens, {share:.0%} are ours")


def sharing_round(
    systems: Runs, vllm: bool, prompts: Prompts, number: int, found: Found, tell: Callable[[], None], sharing: Sharing = SHARING
) -> None:
    """Have the users of one system prompt come, in all ways; `tell` is called after each.

    Raises:
        MeasureError: a system does not do it, or did not find in its cache what it should have found.
    """
    system = prompts.fresh(1, sharing.system)[0]
    runs: list[Run] = []

    def users(count: int) -> list[list[int]]:
        return [system + question for question in prompts.fresh(count, sharing.question)]

    def run(name: str, asked: list[list[int]], outputs: int, cached: list[int] | None) -> Run:
        done = systems.run(name, asked, outputs)
        if cached is not None:
            _check_cached(name, done, cached)
        runs.append(done)
        tell()
        return done

    everybody = users(sharing.users)
    # Cold, then warm: the first users leave the system prompt in the cache.
    cold = run(OURS, users(sharing.users), sharing.outputs, None)
    seconds: dict[str, float] = {}
    ways = [OURS, UNCACHED, *([VLLM] if vllm else [])]
    for name in turns(ways, number):
        if name == VLLM:
            systems.run(VLLM, users(1), 1)  # so that it is warm, too
        hit = sharing.system if name == OURS else 0
        seconds[name] = run(name, everybody, sharing.outputs, [hit] * sharing.users).seconds
    first: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(sharing.alone):
        for warm in (True, False) if turn % 2 == 0 else (False, True):
            asked = users(1) if warm else prompts.fresh(1, sharing.question)
            answer = run(OURS, asked, sharing.outputs, [sharing.system if warm else 0]).answers[0]
            assert answer.first_seconds is not None
            first[warm].append(answer.first_seconds)
    found.sharing.append(
        SharingRound(
            round=number,
            cold_seconds=cold.seconds,
            warm_seconds=seconds[OURS],
            uncached_seconds=seconds[UNCACHED],
            vllm_seconds=seconds.get(VLLM),
            first_warm_seconds=first[True],
            first_cold_seconds=first[False],
            waiting=[done.waiting for done in runs],
            foreign=[done.foreign for done in runs],
        )
    )


def sharing_steps(vllm: bool, sharing: Sharing = SHARING) -> int:
    """Return how often `sharing_round` tells."""
    return 3 + vllm + 2 * sharing.alone


def _check_cached(name: str, run: Run, wanted: Sequence[int]) -> None:
    """Insist on what was found in a prefix cache, where it is known."""
    cached = [answer.cached for answer in run.answers]
    if any(one is not None for one in cached) and cached != list(wanted):
        raise MeasureError(f"{name} found {cached} prompt tokens in its cache, and {list(wanted)} were there to be found")
