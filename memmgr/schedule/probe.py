"""A dry run: what would become of a request if it came now. Reads the scheduler and its memory, changes nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass

from memmgr.schedule.admission import plan_admission
from memmgr.schedule.scheduler import Scheduler
from memmgr.schedule.sizes import most_outputs


@dataclass(frozen=True, slots=True)
class Probe:
    """What would be. Block counts are for whole requests: `worst_case_blocks` with all outputs that its sequences can have."""

    fits_now: bool
    fits_ever: bool
    cached_tokens: int
    new_blocks: int
    worst_case_blocks: int
    evicted_blocks: tuple[int, ...]
    waiting_ahead: int


def probe(scheduler: Scheduler, tenant: str, salt: str, tokens: array[int], max_tokens: int, sequences: int) -> Probe:
    """Return what would become of a request of `sequences` sequences, at the usual priority.

    It fits now if memory, batch and its tenant's quota have room for its prompt and the first token of each sequence, whoever
    waits ahead of it. It fits ever if they have once nothing else runs.
    """
    memory, limits = scheduler.memory, scheduler.limits
    lineage, running_limit = scheduler.lineage(tenant, salt), memory.quotas.max_running(tenant) or limits.max_running
    size, length = memory.block_size, len(tokens)
    room = limits.context_length - length
    most = most_outputs(tenant, length, sequences, memory, limits)
    wanted = max(0, min(room, max_tokens or room))
    outputs = min(wanted, most) if most >= 1 else wanted  # what never fits is told with all that it asks for
    shared = length // size
    of_each = memory.blocks_for(length + outputs) - shared  # the last block of the prompt is each sequence's own in the end
    to_begin = (memory.blocks_for(length + 1) - shared) * (sequences - 1)
    fits_ever = most >= 1 and sequences <= min(running_limit, limits.max_running)
    waiting_ahead = bisect_right(scheduler.waiting, 0, key=lambda request: request.submission.priority)
    if room < 1:
        return Probe(False, False, 0, memory.blocks_for(length), shared + of_each * sequences, (), waiting_ahead)
    admission = plan_admission(lineage, tokens, to_begin, scheduler.running, memory)
    if admission is None:
        match = memory.plan_match(lineage, tokens)
        cached_tokens, whole = len(match.blocks) * size + match.tail_tokens, len(match.blocks)
    else:
        cached_tokens, whole = admission.cached_tokens, len(admission.match.blocks)
    new_blocks = memory.blocks_for(length) - whole
    fits_now = fits_ever and admission is not None and scheduler.batch_has_room(tenant, sequences)
    return Probe(
        fits_now=fits_now,
        fits_ever=fits_ever,
        cached_tokens=cached_tokens,
        new_blocks=new_blocks,
        worst_case_blocks=shared + of_each * sequences,
        evicted_blocks=tuple(memory.plan_evictions(admission, new_blocks)) if fits_now and admission is not None else (),
        waiting_ahead=waiting_ahead,
    )
