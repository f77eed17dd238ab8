"""One request's life.

    state     on                                            becomes
    WAITING   admitted: slot and table given                RUNNING
    WAITING   cancelled, deadline passed, executor lost     ENDED
    RUNNING   preempted: slot and table taken back          WAITING, with its arrival, so its seniority
    RUNNING   stop token, max_tokens, context, NaN          ENDED
    RUNNING   finished by a stop string, cancelled, lost    ENDED

Lengths, in tokens, for a running request:

    0 ........ table.computed ........ table.planned ........ promised
               acknowledged            in plans that left     known, or being sampled by a plan that left

`promised` = prompt + outputs that some plan samples or sampled. A token whose K and V no plan has computed yet lies in planned ..
promised - 1; there is work while there is one, and an output is still wanted after it.
"""

from array import array
from enum import IntEnum
from typing import Final

from memmgr.core.memory import Table
from memmgr.core.prefix import Lineage
from memmgr.schedule.plans import Submission


class State(IntEnum):
    """See the module."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


class Request:
    """A live request. Only the scheduler changes it."""

    __slots__ = (
        "arrival",
        "arrived_at",
        "cached_tokens",
        "first_admitted_at",
        "high_water",
        "in_flight",
        "lineage",
        "max_outputs",
        "outputs_promised",
        "preemptions",
        "residence",
        "slot",
        "state",
        "submission",
        "table",
        "tokens",
        "told",
    )

    def __init__(self, submission: Submission, lineage: Lineage, max_outputs: int, arrival: int, now: float) -> None:
        self.submission: Final = submission
        self.lineage: Final = lineage
        self.max_outputs: Final = max_outputs
        self.arrival: Final = arrival  # grows with each submission
        self.arrived_at: Final = now
        self.tokens: Final = array("I", submission.prompt)  # prompt and known outputs
        self.state = State.WAITING
        self.table: Table | None = None
        self.slot = -1
        self.told: list[int] = []  # the table as the executor knows it
        self.residence = 0  # counts admissions: a result for an earlier one acknowledges nothing
        self.outputs_promised = 0
        self.in_flight = 0  # plans out that name it
        self.high_water = 0  # tokens that were computed or found in the cache at some time
        self.first_admitted_at: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def rank(self) -> tuple[int, int]:
        """The order of service: priority, then arrival."""
        return (self.submission.priority, self.arrival)

    @property
    def owner(self) -> tuple[str, str, int]:
        """What the memory's records call its sequence: tenant, request id, index."""
        return (self.submission.tenant, self.submission.request_id, 0)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.submission.prompt)

    @property
    def outputs(self) -> int:
        """Output tokens known so far."""
        return len(self.tokens) - len(self.submission.prompt)

    @property
    def promised(self) -> int:
        """See the module."""
        return len(self.submission.prompt) + self.outputs_promised

    @property
    def uncomputed(self) -> int:
        """Tokens that the next steps have to compute before the next output can be sampled; 0 where none is wanted."""
        assert self.table is not None
        return self.promised - self.table.planned if self.outputs_promised < self.max_outputs else 0

    @property
    def decoding(self) -> bool:
        """Whether what is left to compute is an output, or nothing."""
        assert self.table is not None
        return self.outputs_promised > 0 and self.promised - self.table.planned <= 1

    def tell(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return what the executor's table lacks: entries at its end, and (logical, block) of replaced ones.

        Only the last entry that it was told can have been replaced: no other is ever written again.
        """
        assert self.table is not None
        blocks, told = self.table.blocks, self.told
        edits: tuple[tuple[int, int], ...] = ()
        last = len(told) - 1
        if told and told[last] != blocks[last]:
            edits = ((last, blocks[last]),)
            told[last] = blocks[last]
        new_blocks = tuple(blocks[len(told) :])
        told.extend(new_blocks)
        return new_blocks, edits
