"""One request's life, and that of the sequences that it consists of: samples of one prompt, most often one, or beams.

    state     on                                            becomes
    WAITING   admitted: slots and a table given             RUNNING
    WAITING   cancelled, deadline passed, executor lost     ENDED
    RUNNING   preempted: slots and tables taken back        WAITING, with its arrival, so its seniority; swapped, where its
                                                            tables went to the host
    RUNNING   all its sequences have ended                  ENDED
    RUNNING   cancelled, lost                               ENDED

A request is admitted and preempted as a whole. Where several of its sequences live, one of them, the trunk, computes the prompt;
then the others fork from it, and each goes its own way: on with its first token, or, when it comes back, with those that it has.
A sequence ends by itself: stop token, max_tokens, context, NaN, a stop string. A beam does not: its search moves it, from its
lane to any number of lanes, once all running beams have their choices; until then none of them has anything to compute.

Lengths, in tokens, for a running sequence:

    0 ........ table.computed ........ table.planned ........ promised
               acknowledged            in plans that left     known, or being sampled by a plan that left

`promised` = prompt + outputs that some plan samples or sampled; of a beam those that the search has decided on. A token whose K
and V no plan has computed yet lies in planned .. promised - 1; there is work while there is one, and an output is still wanted
after it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from memmgr.core.lineage import Lineage
from memmgr.core.table import Table
from memmgr.schedule.beams import BeamSearch, Choice
from memmgr.schedule.plans import RequestKey, Submission

#: Names a sequence for good: its request, and its index among the samples.
SequenceKey = tuple[RequestKey, int]


class State(IntEnum):
    """See the module."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


class Sequence:
    """One of a request's sequences. Only the scheduler changes it."""

    __slots__ = (
        "choices",
        "ended",
        "high_water",
        "in_flight",
        "index",
        "key",
        "lineage",
        "moved",
        "outputs_promised",
        "request",
        "slot",
        "table",
        "tokens",
        "told",
    )

    def __init__(self, request: Request, index: int, lineage: Lineage) -> None:
        self.request: Final = request
        self.index: Final = index
        self.key: Final[SequenceKey] = (request.submission.key, index)
        self.lineage = lineage  # of its own from the fork on
        self.tokens: Final = array("I", request.submission.prompt)  # prompt and known outputs
        self.ended = False
        self.table: Table | None = None
        self.slot = -1
        self.told: list[int] = []  # the table as the executor knows it
        self.outputs_promised = 0
        self.in_flight = 0  # plans out that compute or sample something for it
        self.high_water = 0  # tokens that were computed or found in the cache at some time
        self.choices: tuple[Choice, ...] | None = None  # of a beam: what could follow; None: not known yet
        self.moved = False  # of a beam: any entry of the table may be another than the executor was told

    @property
    def owner(self) -> tuple[str, str, int]:
        """What the memory's records call it: tenant, request id, index."""
        submission = self.request.submission
        return (submission.tenant, submission.request_id, self.index)

    @property
    def outputs(self) -> int:
        """Output tokens known so far."""
        return len(self.tokens) - self.request.prompt_length

    @property
    def promised(self) -> int:
        """See the module."""
        return self.request.prompt_length + self.outputs_promised

    @property
    def uncomputed(self) -> int:
        """Tokens that the next steps have to compute before the next output can be sampled, or the others can fork; 0: none."""
        table, request, outputs = self.table, self.request, self.outputs_promised
        if table is None:
            return 0  # it has not forked yet
        if not request.forked:
            return request.prompt_length - table.planned
        return request.prompt_length + outputs - table.planned if outputs < request.max_outputs else 0

    @property
    def decoding(self) -> bool:
        """Whether what is left to compute is an output, or nothing."""
        table, request, outputs = self.table, self.request, self.outputs_promised
        return table is not None and outputs > 0 and request.forked and request.prompt_length + outputs - table.planned <= 1

    def is_sampled_at(self, length: int) -> bool:
        """Whether a plan that computes its first `length` tokens has to sample what follows."""
        search = self.request.search
        return length == self.promised and (search is None or (self.choices is None and self.index in search.running))

    def tell(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return what the executor's table lacks: entries at its end, and (logical, block) of replaced ones.

        Only the last entry that it was told can have been replaced: no other is ever written again, but where a beam has moved
        in.
        """
        assert self.table is not None
        blocks, told = self.table.blocks, self.told
        if len(told) == len(blocks) and told[-1:] == blocks[-1:] and not self.moved:
            return (), ()
        first = 0 if self.moved else max(0, len(told) - 1)
        edits = tuple((logical, blocks[logical]) for logical in range(first, len(told)) if told[logical] != blocks[logical])
        for logical, block in edits:
            told[logical] = block
        self.moved = False
        new_blocks = tuple(blocks[len(told) :])
        told.extend(new_blocks)
        return new_blocks, edits


class Request:
    """A live request. Only the scheduler changes it, and its `priority` only while it is in no queue."""

    __slots__ = (
        "arrival",
        "arrived_at",
        "cached_tokens",
        "first_admitted_at",
        "forked",
        "max_outputs",
        "most_blocks",
        "passed",
        "preemptions",
        "priority",
        "prompt_length",
        "residence",
        "search",
        "sequences",
        "state",
        "submission",
        "swapped",
        "told",
    )

    def __init__(
        self, submission: Submission, lineage: Lineage, max_outputs: int, most_blocks: int, arrival: int, now: float
    ) -> None:
        self.submission: Final = submission
        self.prompt_length: Final = len(submission.prompt)  # tokens
        self.max_outputs = max_outputs  # of each sequence; fewer where its tenant's limit is lowered
        self.most_blocks: Final = most_blocks  # of all of them together, the prompt's shared
        self.arrival: Final = arrival  # grows with each submission
        self.arrived_at: Final = now
        self.priority = submission.priority  # in force: raised while a more urgent request waits for what this one computes
        self.state = State.WAITING
        self.swapped = False  # it waits, and what its sequences had is on the host
        self.forked = False  # the prompt is in plans that left, and each of its sequences has a table
        self.residence = 0  # counts admissions: a result for an earlier one acknowledges nothing
        self.first_admitted_at: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        # Prompt tokens of which nothing is to be told any more, or plans that left tell it; of the first one nothing can be told.
        self.told = self.prompt_length if submission.prompt_alternatives is None else 1
        self.passed = 0  # how often others were admitted while it was the first of the queue and had no room
        self.sequences: Final = tuple(Sequence(self, index, lineage) for index in range(submission.width))
        self.search: Final = _search(submission, max_outputs)

    def cut(self, room: int) -> None:
        """Let each of its sequences have at most `room` outputs; those that have more by now are to be ended."""
        self.max_outputs = min(self.max_outputs, max(1, room))
        if self.search is not None:
            self.search.most_outputs = self.max_outputs

    @property
    def tells(self) -> bool:
        """Whether something of the prompt is still to be told. Until then it is computed whole, whatever of it is cached."""
        return self.told < self.prompt_length

    @property
    def history_size(self) -> int:
        """What the histories of its sequences take in a plan that opens them, at most, counted in tokens."""
        return sum(len(one.tokens) for one in self.live) if self.submission.counts_tokens else 0

    @property
    def rank(self) -> tuple[int, int]:
        """The order of service: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not ended, by index."""
        return [sequence for sequence in self.sequences if not sequence.ended]

    @property
    def trunk(self) -> Sequence:
        """The sequence that computes the prompt for all; there is one while the request lives."""
        return next(sequence for sequence in self.sequences if not sequence.ended)

    @property
    def in_flight(self) -> bool:
        """Whether a plan is out that names one of the living sequences."""
        return any(sequence.in_flight for sequence in self.sequences if not sequence.ended)

    @property
    def trunk_tokens(self) -> array[int]:
        """What the trunk computes before anything else of the request can run: all that it knows, where it is alone."""
        live = self.live
        return live[0].tokens if len(live) == 1 else self.submission.prompt

    def check_invariants(self, in_flight: Mapping[Sequence, int]) -> int:
        """Check the lengths of a live request's sequences, of which so many plans are out. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        checks, search = 6, self.search
        assert self.live, "a request without a sequence"
        if search is not None:
            checks += search.check_invariants()
            for lane in search.running:
                assert self.sequences[lane].tokens[self.prompt_length :] == search.tokens(lane), "a beam is in another lane"
        for sequence in self.live:
            assert sequence.in_flight == in_flight.get(sequence, 0)
            assert sequence.outputs <= sequence.outputs_promised <= self.max_outputs
            assert sequence.outputs_promised - sequence.outputs <= sequence.in_flight
            if self.state is State.RUNNING:
                assert (sequence.table is not None) == (self.forked or sequence is self.trunk)
            if sequence.table is not None:
                assert sequence.table.planned <= sequence.promised
                assert len(sequence.told) <= len(sequence.table.blocks)
        return checks


def _search(submission: Submission, max_outputs: int) -> BeamSearch | None:
    if submission.beam_width <= 1:
        return None
    return BeamSearch(submission.beam_width, submission.length_penalty, submission.stop_token_ids, max_outputs)
