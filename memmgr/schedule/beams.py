"""Beam search, as transformers does it with early_stopping=False: which continuations of a prompt run on, which are done.

Knows lanes, tokens and scores; not sequences, memory or steps. A lane is a place among the `width` beams that run side by side;
which beam is in which lane means nothing but that a beam stays where it is if it can, so that its memory needs no new name.

In each step every running beam is continued by its most likely tokens. Of all continuations, ordered by the sum of their
log-probabilities:

    among the best `width`, one that ends              is done, with score = sum / length ** length_penalty; the best `width` stay
    the best `width` that do not end                   run on
    at the last step                                   the best `width` are done, whether they end or not

The search is over when no running beam could still beat the worst of `width` that are done, were it to end where it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation of a beam. `logprob` is the model's own; `detail` goes with it, unread, to whoever gets the tokens."""

    token: int
    logprob: float
    detail: Any = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that is done: its outputs, its final score, and whether its last token is one that ends."""

    score: float
    tokens: tuple[int, ...]
    details: tuple[object, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Move:
    """After a step the beam of lane `parent`, continued by `token`, is in lane `lane`."""

    lane: int
    parent: int
    token: int


@dataclass(slots=True)
class _Beam:
    """A running beam: the sum of its log-probabilities, its outputs and what goes with them."""

    total: float = 0.0
    tokens: array[int] = field(default_factory=lambda: array("I"))
    details: list[object] = field(default_factory=list)

    def followed_by(self, choice: Choice) -> _Beam:
        return _Beam(self.total + choice.logprob, self.tokens + array("I", [choice.token]), [*self.details, choice.detail])


class BeamSearch:
    """See the module. `ends` are the tokens that end a beam; `most_outputs` bounds each one's length, in tokens."""

    def __init__(self, width: int, length_penalty: float, ends: frozenset[int], most_outputs: int) -> None:
        assert width >= 1
        assert most_outputs >= 1
        self.width: Final = width
        self.length_penalty: Final = length_penalty
        self.ends: Final = ends
        self.most_outputs = most_outputs  # may be cut, to more than the running beams have
        self.finished: list[Hypothesis] = []  # the best first
        # All begin alike, so one begins: the others get their beams by its first step.
        self._lanes: dict[int, _Beam] = {0: _Beam()}

    @property
    def choices(self) -> int:
        """How many of a beam's most likely tokens can matter: `width` that end it not, behind all that do."""
        return self.width + len(self.ends)

    @property
    def running(self) -> list[int]:
        """The lanes whose beams run: each needs choices before the next `advance`."""
        return sorted(self._lanes)

    def tokens(self, lane: int) -> array[int]:
        """Return the outputs of a running beam."""
        return self._lanes[lane].tokens

    @property
    def length(self) -> int:
        """Outputs of each running beam."""
        return max((len(beam.tokens) for beam in self._lanes.values()), default=0)

    def advance(self, offered: dict[int, Sequence[Choice]]) -> list[Move]:
        """Make one step, given each running lane's most likely tokens; nobody's where its logits were no numbers.

        Returns where each beam that runs on has gone: at most one move to a lane, those that stay in theirs among them. An empty
        list: the search is over, `finished` has the result.
        """
        assert offered.keys() == self._lanes.keys(), "a running beam has no choices, or one that does not run has"
        length = self.length + 1
        continuations = [
            (-(beam.total + choice.logprob), lane, place, choice)
            for lane, beam in self._lanes.items()
            for place, choice in enumerate(offered[lane])
        ]
        best = nsmallest(self.width * (1 + len(self.ends)), continuations, key=lambda one: one[:3])
        last = length == self.most_outputs
        for _, lane, _, choice in best[: self.width]:
            if last or choice.token in self.ends:
                self._finish(self._lanes[lane].followed_by(choice), choice.token in self.ends)
        running = [] if last else [(lane, choice) for _, lane, _, choice in best if choice.token not in self.ends][: self.width]
        if not running or not self._can_improve(self._lanes[running[0][0]].total + running[0][1].logprob, length):
            self._lanes = {}
            return []
        return self._settle(running)

    def stop(self) -> None:
        """End the search where it is: what runs is done, whether it ends or not."""
        for beam in self._lanes.values():
            self._finish(beam, ended=False)
        self._lanes = {}

    def _finish(self, beam: _Beam, ended: bool) -> None:
        score = self._score(beam.total, len(beam.tokens))
        self.finished.append(Hypothesis(score, tuple(beam.tokens), tuple(beam.details), ended))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equals the first to be done stays first
        del self.finished[self.width :]

    def _can_improve(self, best_total: float, length: int) -> bool:
        if len(self.finished) < self.width:
            return True
        return self._score(best_total, length) > self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        penalty: float = length**self.length_penalty
        return total / penalty

    def _settle(self, running: list[tuple[int, Choice]]) -> list[Move]:
        """Give each beam that runs on a lane: its parent's for the first child, a free one for every other."""
        first: dict[int, int] = {}
        for number, (parent, _) in enumerate(running):
            first.setdefault(parent, number)
        free = iter([lane for lane in range(self.width) if lane not in first])
        moves: list[Move] = []
        lanes: dict[int, _Beam] = {}
        for number, (parent, choice) in enumerate(running):
            lane = parent if first[parent] == number else next(free)
            lanes[lane] = self._lanes[parent].followed_by(choice)
            moves.append(Move(lane, parent, choice.token))
        self._lanes = lanes
        return moves

    def check_invariants(self) -> int:
        """Check lanes and what is done. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        assert set(self._lanes) <= set(range(self.width)), "a beam is in no lane"
        assert len({len(beam.tokens) for beam in self._lanes.values()}) <= 1, "running beams differ in length"
        assert len({tuple(beam.tokens) for beam in self._lanes.values()}) == len(self._lanes), "two beams are the same"
        assert len(self.finished) <= self.width
        scores = [hypothesis.score for hypothesis in self.finished]
        assert scores == sorted(scores, reverse=True)
        return 5
