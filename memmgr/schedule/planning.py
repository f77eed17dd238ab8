"""The batch of a step: which tokens of which sequences it computes, and the plan that says so.

Each step has a budget of tokens. Running sequences that decode come first, one token each, so that a long prompt never stalls a
stream; the rest of the budget goes to prompts, in chunks, running ones before waiting ones, in order of rank.

Plans leave before the results of earlier ones are back: a sequence's next token may be "the one sampled last".

Knows the order of a step's parts and the form of a plan; not who is preempted (drafts.py), who is admitted (admitting.py) or what
becomes of the results (results.py).
"""

from __future__ import annotations

from typing import Final

from memmgr.core.memory import Memory
from memmgr.core.swap import SwappingMemory
from memmgr.schedule.admitting import Admitting
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.drafts import Draft
from memmgr.schedule.lanes import Searches
from memmgr.schedule.plans import Limits, Plan, PlannedChunk, PlannedSample, PlannedTelling
from memmgr.schedule.queues import Queues
from memmgr.schedule.requests import Request, Sequence, State
from memmgr.schedule.results import Results, Row


class Planner:
    """See the module. `step` is the number of the last plan; `limits` have the budget of one."""

    __slots__ = ("_admitting", "_counters", "_limits", "_memory", "_queues", "_results", "_swap", "step")

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        swap: SwappingMemory | None,
        queues: Queues,
        searches: Searches,
        results: Results,
        counters: ScheduleCounters,
    ) -> None:
        self.step = 0
        self._limits: Final = limits
        self._memory: Final = memory
        self._swap: Final = swap
        self._queues: Final = queues
        self._results: Final = results
        self._counters: Final = counters
        self._admitting: Final = Admitting(memory, swap, queues, searches, counters, limits.max_history_tokens)

    def plan(self) -> Plan | None:
        """Plan the next step; None where there is nothing to do until a result or a request comes."""
        queues = self._queues
        limits = self._limits
        draft = Draft(limits.max_step_tokens, self._memory, self._swap, queues, self._counters, limits.max_prompt_rows)
        draft.settle()
        decoding: list[Sequence] = []
        others: list[Sequence] = []
        for request in queues.running:
            for sequence in request.sequences:
                if not sequence.ended:
                    (decoding if sequence.decoding else others).append(sequence)
        for sequence in decoding + others:
            if sequence.request.state is State.RUNNING:  # not preempted a moment ago
                draft.schedule(sequence)
        self._admitting.admit(draft)
        self._admitting.let_pass(draft)
        if not draft.counts and not draft.opened and not queues.slots.any_closing:
            return None
        return self._seal(draft)

    def _seal(self, draft: Draft) -> Plan:
        """Turn a draft into a plan that leaves."""
        self.step += 1
        chunks: list[PlannedChunk] = []
        samples: list[PlannedSample] = []
        tellings: list[PlannedTelling] = []
        rows: list[Row] = []
        forking: list[Request] = []
        for sequence, count in draft.counts.items():
            table, request = sequence.table, sequence.request
            assert table is not None
            start = table.planned - count
            known = start < len(sequence.tokens)
            tokens = sequence.tokens[start : start + count] if known else None
            assert len(tokens) == count if tokens is not None else count == 1
            forks: list[Sequence] = []
            if not request.forked and table.planned == request.prompt_length:
                forking.append(request)
                forks = request.live[1:]
            sampled = [one for one in (sequence, *forks) if one.is_sampled_at(table.planned)]
            for one in sampled:
                samples.append(_planned_sample(len(chunks), one))
                one.outputs_promised += request.search is None
            telling = _planned_telling(len(chunks), request, start, table.planned) if request.tells else None
            if telling is not None:
                tellings.append(telling)
            new_blocks, edits = sequence.tell()
            chunks.append(PlannedChunk(sequence.slot, start, count, tokens, new_blocks, edits))
            rows.append(Row(sequence, request.residence, start, table.planned, tuple(sampled), tuple(forks), telling is not None))
            sequence.in_flight += 1
            for one in sampled:
                one.in_flight += one is not sequence
        opens = tuple(
            (sequence.slot, request.submission.sampling, sequence.index)
            for request in draft.opened
            for sequence in request.sequences
            if not sequence.ended
        )
        histories = tuple(
            (sequence.slot, request.submission.prompt_seen, sequence.tokens[request.prompt_length :])
            for request in draft.opened
            if request.submission.counts_tokens
            for sequence in request.live
        )
        self._results.expect(self.step, rows)
        self._counters.planned_steps += 1
        plan = Plan(
            self.step,
            self._memory.end_step(),
            self._queues.slots.closes(),
            opens,
            tuple(chunks),
            tuple(samples),
            histories,
            tuple(tellings),
        )
        for request in forking:
            self._fork(request)
        return plan

    def _fork(self, request: Request) -> None:
        """Give a request's other sequences the trunk's content: the prompt, which plans that left compute."""
        request.forked = True
        trunk, *others = request.live
        for sequence in others:
            sequence.table = self._memory.fork(trunk.key, sequence.key, sequence.owner)
            sequence.lineage = sequence.table.lineage
            sequence.high_water = max(sequence.high_water, request.prompt_length)


def _planned_telling(chunk: int, request: Request, start: int, end: int) -> PlannedTelling | None:
    """Return what is to be told of a prompt where positions start .. end - 1 of it are computed; None: nothing new.

    Position p gives the distribution that token p + 1 came from.
    """
    first, last = request.told - 1, min(end, request.prompt_length - 1)
    if first >= last:
        return None
    assert start <= first, "a prompt of which something is to be told was not computed whole"
    request.told = last + 1
    alternatives = request.submission.prompt_alternatives
    assert alternatives is not None
    return PlannedTelling(chunk, first - start, request.submission.prompt[first + 1 : last + 1], alternatives)


def _planned_sample(chunk: int, sequence: Sequence) -> PlannedSample:
    search = sequence.request.search
    if search is None:
        return PlannedSample(chunk, sequence.slot, sequence.outputs_promised)
    alternatives = sequence.request.submission.alternatives
    return PlannedSample(chunk, sequence.slot, sequence.outputs, max(search.choices, alternatives or 0), alternatives)
