"""What a request comes to: the tokens of its sequences, the end of each, its own end, and what its client hears of all that.

Tokens end a sequence (stop token, max_tokens, context), the last of its sequences ends a request. Every request ends here, for
whatever reason, once: it leaves its place, and what it holds is free at once. Events gather in order until they are taken.

Knows tokens, ends and events; not plans, nor who asks for an end (scheduler.py, results.py).
"""

from __future__ import annotations

from typing import Final

from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.lanes import outcome
from memmgr.schedule.plans import EndCode, Event, FinishReason, NewToken, PromptTold, RequestEnd, RequestKey, Sampled, SequenceEnd
from memmgr.schedule.queues import Queues
from memmgr.schedule.registry import Registry
from memmgr.schedule.requests import Request, Sequence, State


class Outputs:
    """See the module."""

    __slots__ = ("_counters", "_events", "_queues", "_registry")

    def __init__(self, registry: Registry, queues: Queues, counters: ScheduleCounters) -> None:
        self._registry: Final = registry
        self._queues: Final = queues
        self._counters: Final = counters
        self._events: list[Event] = []

    def take_events(self) -> list[Event]:
        """Return what clients are to hear, in order, and forget it."""
        events, self._events = self._events, []
        return events

    def tell(self, request: Request, logprobs: tuple[object, ...]) -> None:
        """Let the client hear of the prompt's next tokens."""
        if request.state is not State.ENDED:
            self._events.append(PromptTold(request.submission.key, logprobs))

    def append(self, sequence: Sequence, result: Sampled, now: float) -> None:
        """Add a sampled token to its sequence, which may end with it; a beam's choices wait for the others'."""
        if sequence.ended:
            return
        request = sequence.request
        submission = request.submission
        if request.search is not None:
            sequence.choices = result.choices
            return
        if result.failed:
            self.complete(sequence, sequence.outputs, FinishReason.ERROR, now)
            return
        self._events.append(NewToken(submission.key, sequence.index, sequence.outputs, result.token, result.logprob))
        sequence.tokens.append(result.token)
        if result.token in submission.stop_token_ids:
            self.complete(sequence, sequence.outputs, FinishReason.EOS, now)
        elif sequence.outputs == request.max_outputs:
            reason = FinishReason.LENGTH if sequence.outputs == submission.max_tokens else FinishReason.CONTEXT
            self.complete(sequence, sequence.outputs, reason, now)

    def complete(self, sequence: Sequence, output_tokens: int, reason: FinishReason, now: float) -> None:
        """End one sequence, and with the last one its request."""
        request, queues = sequence.request, self._queues
        self._counters.decode_tokens += max(0, output_tokens - 1)
        self._events.append(SequenceEnd(request.submission.key, sequence.index, output_tokens, reason))
        if len(request.live) == 1:
            self._counters.finished_requests += 1
            self.end(request, EndCode.OK, "", now)
            return
        if request.state is State.RUNNING:
            if not request.forked and sequence is request.trunk:
                queues.set_aside(request)  # the others have nothing yet: another one has to compute the prompt
            else:
                queues.release(sequence)
        else:
            queues.drop_swapped(sequence)
            # Where nothing had forked, the trunk alone has something there: with it there is nothing to bring back.
            request.swapped = request.swapped and (request.forked or sequence is not request.trunk)
        sequence.ended = True

    def conclude(self, request: Request, now: float) -> None:
        """End a request whose search is over."""
        for event in outcome(request):
            self._events.append(event)
            if isinstance(event, SequenceEnd):
                self._counters.decode_tokens += max(0, event.output_tokens - 1)
        self._counters.finished_requests += 1
        self.end(request, EndCode.OK, "", now)

    def end(self, request: Request, code: EndCode, message: str, now: float) -> None:
        """End a request, whatever its sequences have; everything that it holds is free at once."""
        self._queues.remove(request)
        request.state = State.ENDED
        for sequence in request.live:
            sequence.ended = True
        self._registry.remove(request)
        admitted_at = now if request.first_admitted_at is None else request.first_admitted_at
        queue_seconds = admitted_at - request.arrived_at
        key = request.submission.key
        self._events.append(RequestEnd(key, code, message, request.cached_tokens, request.preemptions, queue_seconds))

    def refuse(self, key: RequestKey, code: EndCode, message: str) -> None:
        """End a request that has not begun to live."""
        self._counters.rejected_requests += 1
        self._events.append(RequestEnd(key, code, message))
