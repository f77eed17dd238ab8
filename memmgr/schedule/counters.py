"""What the scheduler counts of requests, tokens and steps, and how each token is counted as new only once.

Knows sequences and how far each was computed at some time; not when counters are read, nor the memory's own (core/memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from memmgr.schedule.requests import Sequence


@dataclass(slots=True)
class ScheduleCounters:
    """Never fall. prefill_tokens = prefix_query_tokens - prefix_hit_tokens where nothing was preempted."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    finished_requests: int = 0
    cancelled_requests: int = 0
    rejected_requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    discarded_tokens: int = 0
    planned_steps: int = 0
    acknowledged_steps: int = 0

    def count_hits(self, trunk: Sequence, cached_tokens: int) -> None:
        """Count what an admission found of the prompt and no earlier one had found or computed: each token counts once."""
        of_prompt = max(0, min(cached_tokens, trunk.request.prompt_length) - trunk.high_water)
        self.prefix_query_tokens += of_prompt
        self.prefix_hit_tokens += of_prompt
        trunk.high_water = max(trunk.high_water, cached_tokens)

    def count_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Count the tokens start .. end - 1 of a sequence, which have been computed."""
        if start >= sequence.high_water and start >= sequence.request.prompt_length:
            sequence.high_water = end
            return
        first_time = max(0, end - max(start, sequence.high_water))
        self.recomputed_tokens += end - start - first_time
        of_prompt = max(0, min(end, sequence.request.prompt_length) - max(start, sequence.high_water))
        self.prefill_tokens += of_prompt
        self.prefix_query_tokens += of_prompt
        sequence.high_water = max(sequence.high_water, end)
