"""One pool's side of `benchmarks.allocator`: how long it takes to make, and to plan a step with it. Runs in a fresh process.

    python -m benchmarks.allocator_pools NUM_BLOCKS

Prints one line of JSON when the pool is there: its seconds and megabytes. Then, for each line of standard input, does a round of
steps, and prints the microseconds of planning one and of taking its result, the medians. So rounds of several sizes alternate.

What runs is the scheduler on its memory, as memmgr's engine calls it: 256 sequences that decode, each with a token a step, and
blocks that fill. The collector of cycles is on; what the pool consists of is frozen, as memmgr does it.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
from array import array
from pathlib import Path
from time import perf_counter, thread_time
from typing import Final

from memmgr.core.lineage import root_hash
from memmgr.core.memory import Memory
from memmgr.core.table import MemoryCounters
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import Limits, Sampled, Submission
from memmgr.schedule.scheduler import Scheduler

_BLOCK_SIZE: Final = 16
_RUNNING: Final = 256
_PROMPT_TOKENS: Final = 64
_OUTPUT_TOKENS: Final = 400  # so that all fit the smallest pool, of ten thousand blocks
_WARM_STEPS: Final = 16
_STEPS: Final = 128  # of a round; in each, one of sixteen sequences begins a block


def _megabytes() -> float:
    """Return this process's memory, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Steps:
    """A scheduler with requests that are admitted at once and decode."""

    def __init__(self, memory: Memory) -> None:
        limits = Limits(
            max_running=_RUNNING, max_waiting=_RUNNING, max_step_tokens=2 * _RUNNING * _PROMPT_TOKENS, context_length=2048
        )
        self._scheduler = Scheduler(memory, limits, lambda tenant, salt: root_hash("model", tenant, salt), ScheduleCounters())
        self._submitted = 0

    def round(self) -> tuple[float, float]:
        """Run so many requests to their end; return the microseconds of planning a step of them all, and of its result."""
        for _ in range(_RUNNING):
            self._submitted += 1
            number = self._submitted
            prompt = array("I", [number, *range(_PROMPT_TOKENS + number % _BLOCK_SIZE - 1)])
            asked = Submission((1, number), "tenant", str(number), prompt, None, _OUTPUT_TOKENS, frozenset())
            self._scheduler.submit(asked, 0.0)
        times = [self._step() for _ in range(_WARM_STEPS + _STEPS)][_WARM_STEPS:]
        while self._scheduler.running:
            self._step()
        planning, completing = zip(*times, strict=True)
        return statistics.median(planning) * 1e6, statistics.median(completing) * 1e6

    def _step(self) -> tuple[float, float]:
        began = thread_time()
        plan = self._scheduler.plan(0.0)
        planned = thread_time()
        assert plan is not None
        results = [Sampled(token=plan.step % 1000) for _ in plan.samples]
        answered = thread_time()
        self._scheduler.complete(plan.step, results, 0.0)
        completed = thread_time()
        self._scheduler.take_events()
        return planned - began, completed - answered


def main() -> None:
    """See the module."""
    num_blocks, before, began = int(sys.argv[1]), _megabytes(), perf_counter()
    memory = Memory(num_blocks, _BLOCK_SIZE, prefix_cache=True, counters=MemoryCounters())
    gc.freeze()
    start = {"seconds": perf_counter() - began, "megabytes": _megabytes(), "imports_megabytes": before}
    print(json.dumps(start), flush=True)
    steps = _Steps(memory)
    for _ in sys.stdin:
        planning, completing = steps.round()
        print(json.dumps({"planning_us": planning, "completing_us": completing}), flush=True)


if __name__ == "__main__":
    main()
