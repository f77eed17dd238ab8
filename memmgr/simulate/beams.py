"""Beam searches that go on from the beams that a real search went on from: an executor's answers, made up from a recording.

The parents were recorded on the default model (benchmarks/beam_parents.py): for each step, for each of the W beams, the best
first, the one of the step before that it continues. A beam is offered as many tokens as it has children, so W in all, and the
scheduler's own search (schedule/beams.py) can only take them. A token says which of the W beams it ends, for the next step.

An output that is longer than its recording begins the recording again after its first step, in which all beams leave the prompt:
that happens once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

from memmgr.schedule.beams import Choice
from memmgr.schedule.plans import Plan, Sampled
from memmgr.schedule.requests import Request

_RECORDED: Final = "beam_parents.json"

#: The token of the best beam; the others' follow.
_FIRST_TOKEN: Final = 0xFFFF_0000

#: All children are as likely: none is left out.
_LOGPROB: Final = -1.0

#: For each step the parent of each beam.
Parents = tuple[tuple[int, ...], ...]


def recorded() -> dict[int, tuple[Parents, ...]]:
    """Return the searches that come with the package, by their width."""
    return parse(resources.files(__package__).joinpath(_RECORDED).read_text(encoding="ascii"))


def parse(text: str) -> dict[int, tuple[Parents, ...]]:
    """Return the searches of a recording, by width. It is ours: a wrong one is a bug."""
    searches: dict[int, tuple[Parents, ...]] = {}
    for width, lines in json.loads(text)["widths"].items():
        searches[int(width)] = tuple(tuple(tuple(map(int, step)) for step in line.split()) for line in lines)
    for width, found in searches.items():
        for parents in found:
            assert len(parents) >= 2
            assert all(len(step) == width and max(step) < width for step in parents), f"no search of {width} beams"
            assert not any(parents[0]), "before the first step there is one beam"
    return searches


def parents_at(parents: Parents, step: int) -> tuple[int, ...]:
    """Return a step of a recording that begins again, without its first step, at its end."""
    return parents[step if step < len(parents) else 1 + (step - 1) % (len(parents) - 1)]


def answers(plan: Plan, running: Iterable[Request], searches: Sequence[Parents]) -> list[Sampled]:
    """Return the result of a plan in which all requests search; the recordings are theirs in turn."""
    lanes = {sequence.slot: sequence for request in running for sequence in request.live}
    found = []
    for sample in plan.samples:
        lane = lanes[sample.slot]
        _, number = lane.request.submission.key
        beam = lane.tokens[-1] - _FIRST_TOKEN if sample.position else 0
        parents = parents_at(searches[number % len(searches)], sample.position)
        children = (child for child, parent in enumerate(parents) if parent == beam)
        found.append(Sampled(0, choices=tuple(Choice(_FIRST_TOKEN + child, _LOGPROB) for child in children)))
    return found
