"""The long runs of what `make test` does for some seconds: every order of operations, and machines against naive models.

    python -m tests.memmgr.prove [--examples 20000] [--depth 8] [--part world|memory|session]

The small world is searched to `depth` operations from an empty pool, and two less deep from pools that are in use. Each machine
runs the number of examples. Says how far it is about once a minute; ends at the first fault with what shows it. The machines can
prove what is compiled, too (KILBURN_TEST_COMPILED=1); the search reads the core's state field by field, which takes the sources.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.memmgr.memmgr_search import Found, search
from tests.memmgr.memmgr_small_world import BEGINNINGS, BLOCK_SIZE, BLOCKS, MOST_SEQUENCES
from tests.memmgr.test_memmgr_memory_machine import MemoryMachine
from tests.memmgr.test_memmgr_session_machine import SessionMachine

_MINUTE: Final = 60.0

#: Examples of one run of hypothesis, each with a seed of its own: to find what it has not tried yet takes it longer and longer.
_AT_ONCE: Final = 500


class Progress:
    """Says how many examples were done, not too often."""

    def __init__(self, what: str, examples: int) -> None:
        self.what, self.examples = what, examples
        self.done = 0
        self.began = self.said = time.monotonic()

    def count(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if now - self.said > _MINUTE:
            self.said = now
            print(f"{self.what}: {self.done:,} of {self.examples:,} examples, {now - self.began:.0f} s", flush=True)


def prove_small_world(depth: int) -> None:
    """Try every order of operations."""
    print(f"{MOST_SEQUENCES} sequences, {BLOCKS} blocks of {BLOCK_SIZE} tokens, every order of operations:", flush=True)
    for name, operations in BEGINNINGS.items():
        deep, began = depth if not operations else depth - 2, time.monotonic()

        def tell(found: Found, name: str = name, began: float = began) -> None:
            length = len(found.states) - 1
            print(f"  {name}: {length} operations, {sum(found.states):,} states, {time.monotonic() - began:.0f} s", flush=True)

        found = search(deep, operations, progress=tell)
        print(
            f"  {name}: nothing goes wrong in {found.strings[-1]:,} strings of {deep} operations"
            f" ({sum(found.states):,} states, {found.transitions:,} transitions)",
            flush=True,
        )


def prove_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run one machine."""
    progress = Progress(machine.__name__, examples)

    class Counted(machine):  # type: ignore[misc,valid-type]
        def teardown(self) -> None:
            super().teardown()
            progress.count()

    Counted.__name__ = Counted.__qualname__ = machine.__name__
    while progress.done < examples:
        run_state_machine_as_test(
            Counted,
            settings=settings(
                max_examples=min(_AT_ONCE, examples - progress.done),
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(f"{machine.__name__}: {progress.done:,} examples, {time.monotonic() - progress.began:.0f} s", flush=True)


def main() -> None:
    """See the module."""
    parser = ArgumentParser(prog="python -m tests.memmgr.prove", description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--part", choices=["world", "memory", "session"], help="this one alone")
    asked = parser.parse_args()
    if asked.part in {None, "world"}:
        prove_small_world(asked.depth)
    if asked.part in {None, "memory"}:
        prove_machine(MemoryMachine, asked.examples, 40)
    if asked.part in {None, "session"}:
        prove_machine(SessionMachine, asked.examples, 30)


if __name__ == "__main__":
    main()
