"""A system whose two ZeroMQ links go through taps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kilburn.v1.admin_pb2 import Sequence
from kilburn.v1.engine_pb2 import StepPlan
from tests.e2e.place import Place
from tests.e2e.system import Flag, Processes
from tests.e2e.tap import Tap, tables

#: Sequences in a step: few, so that a test can fill the batch.
MAX_RUNNING: Final = 12


@dataclass(frozen=True, slots=True)
class Tapped:
    """The system and its taps: `gateway` hears what gateway and memmgr say, `executor` what memmgr and executor say."""

    system: Processes
    gateway: Tap
    executor: Tap

    def sequence(self, request_id: str) -> Sequence | None:
        """Return a request's sequence with its table, if it lives."""
        listed = (one for one in self.system.admin.sequences(tables=True) if one.request_id == request_id)
        return next(listed, None)

    def is_listed(self, request_id: str) -> bool:
        """Return whether a request lives."""
        return self.sequence(request_id) is not None

    def is_admitted(self, request_id: str) -> bool:
        """Return whether a request holds blocks."""
        sequence = self.sequence(request_id)
        return sequence is not None and sequence.block_count > 0

    def slot_of(self, request_id: str) -> int:
        """Return the executor's slot of a live request, found by its first block; no two tables of a test begin alike."""
        sequence = self.sequence(request_id)
        assert sequence is not None
        first = sequence.table[0].block
        return next(slot for slot, table in tables(self.executor.seen(StepPlan)).items() if table[:1] == [first])

    def slots_opened(self) -> int:
        """Return how often a slot was opened."""
        return sum(len(plan.opens) for _, plan in self.executor.seen(StepPlan))


@contextmanager
def tapped_system(flags: Mapping[str, Flag]) -> Iterator[Tapped]:
    """Start the three services, each peer of memmgr connected through a tap."""
    system = Processes(flags, threads=1)
    with _tap(system.place, "gateway") as gateway, _tap(system.place, "executor") as executor, system:
        system.start("memmgr")
        system.start("gateway", gateway_endpoint=gateway.endpoint)
        system.start("executor", executor_endpoint=executor.endpoint)
        system.connect()
        system.wait_serving()
        yield Tapped(system, gateway, executor)


def _tap(place: Place, name: str) -> Tap:
    return Tap(place.folder / f"{name}.tap", place.runtime_dir / f"{name}.sock")
