"""Where beam search meets memory: a request's sequences are the lanes of its search.

All running beams are of one length and ride in the same plans, where the budget allows it. Once each has its choices, and nothing
of them is under way, the search moves them: a beam's first child stays in its lane, every other takes over the lane of a beam
that died, by a fork. So beams share all but their latest tokens, and a lane keeps its slot.

Knows searches, sequences and tables; not plans, nor how a request ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from memmgr.core.memory import Memory
from memmgr.schedule.plans import Event, FinishReason, NewToken, SequenceEnd
from memmgr.schedule.requests import Request, Sequence, State


class Searches:
    """The requests whose search has had news since the last plan, in the order of the news."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[Request, None] = {}

    def note(self, request: Request) -> None:
        """Take note that something has come for a search."""
        self._due[request] = None

    def clear(self) -> None:
        """Forget what has come."""
        self._due.clear()

    def move(self, memory: Memory) -> Iterator[Request]:
        """Make a step of each search that has all that it needs; yield who is over: to be ended before the next one moves."""
        due, self._due = self._due, {}
        for request in due:
            if can_move(request) and not move(request, memory):
                yield request


def can_move(request: Request) -> bool:
    """Whether all that a step of the search needs is there."""
    search = request.search
    assert search is not None
    lanes = request.sequences
    if request.state is State.ENDED or request.in_flight or any(lanes[lane].choices is None for lane in search.running):
        return False
    if request.state is State.WAITING:
        return not request.swapped  # without memory: tokens alone move
    tables = [lanes[lane].table for lane in search.running]
    return request.forked and all(
        table is not None and table.planned == lanes[lane].promised for lane, table in zip(search.running, tables, strict=True)
    )


def move(request: Request, memory: Memory) -> bool:
    """Make a step of the search, between two plans. False: it is over."""
    search = request.search
    assert search is not None
    lanes = request.sequences
    moves = search.advance({lane: lanes[lane].choices or () for lane in search.running})
    if not moves:
        return False
    assert len(moves) == search.width, "fewer tokens than a beam's continuations need"
    for step in moves:
        if step.lane != step.parent:
            _take_over(lanes[step.lane], lanes[step.parent], memory)
    for step in moves:
        lane = lanes[step.lane]
        lane.tokens.append(step.token)
        lane.outputs_promised += 1
        lane.choices = None
    return True


def _take_over(lane: Sequence, parent: Sequence, memory: Memory) -> None:
    """Give a lane the beam of another one, which is there to stay."""
    if lane.table is not None:
        assert parent.table is not None
        memory.release(lane.key, lane.tokens, keep_tail=False)
        lane.table = memory.fork(parent.key, lane.key, lane.owner)
        lane.lineage = lane.table.lineage
        lane.moved = True
    else:
        lane.lineage = parent.lineage.fork(len(parent.tokens) // memory.block_size)
    lane.tokens[:] = parent.tokens
    lane.outputs_promised = parent.outputs_promised
    lane.high_water = parent.high_water


def outcome(request: Request) -> list[Event]:
    """Return what the client of a search that is over is to hear: the best hypotheses, whole."""
    search, submission = request.search, request.submission
    assert search is not None
    key = submission.key
    events: list[Event] = []
    for index in range(submission.samples):
        if index >= len(search.finished):
            events.append(SequenceEnd(key, index, 0, FinishReason.ERROR))  # no beam had a next token
            continue
        found = search.finished[index]
        events.extend(
            NewToken(key, index, offset, token, detail)
            for offset, (token, detail) in enumerate(zip(found.tokens, found.details, strict=True))
        )
        unended = FinishReason.LENGTH if len(found.tokens) == submission.max_tokens else FinishReason.CONTEXT
        reason = FinishReason.EOS if found.ended else unended
        events.append(SequenceEnd(key, index, len(found.tokens), reason, found.score))
    return events
