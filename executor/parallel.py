"""Tensor parallelism: rank 0 tells the other ranks what to do, and all do it, each with its share of heads and blocks.

Knows runners and ranks; not sockets or models. Each rank has the same slots and tables, and of each block the K and V of its own
heads: a block number means the same on all of them, so memmgr sees one executor.
"""

import time
from typing import Final

from google.protobuf.message import DecodeError

from executor.errors import ExecutorError
from executor.ranks import Ranks
from executor.runner import Runner
from kilburn.v1.engine_pb2 import Inspection, StepPlan, StepResult
from kilburn.v1.ranks_pb2 import RankCommand

#: An idle rank 0 says so this often: far less than the ranks' timeout.
_IDLE_SECONDS: Final = 1.0


class Lead:
    """Rank 0's runner: what is asked of it, the others are told first. Methods raise what Runner's do, and:

    ExecutorError: a rank is gone.
    """

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._told = time.monotonic()

    def run(self, plan: StepPlan) -> StepResult:
        """Do one step on all ranks."""
        self._tell(RankCommand(plan=plan))
        return self._runner.run(plan)

    def reset(self) -> None:
        """See Runner."""
        self._tell(RankCommand(reset=True))
        self._runner.reset()

    def inspect(self, number: int) -> Inspection:
        """Return rank 0's slots, and the faults of all ranks; that another's slots differ is one."""
        self._tell(RankCommand(inspect=number))
        own = self._runner.inspect(number)
        for rank, data in enumerate(self._ranks.collect(own.SerializeToString())):
            if rank == 0:
                continue
            other = Inspection.FromString(data)
            own.checks += other.checks + 1
            own.faults.extend(f"rank {rank}: {fault}" for fault in other.faults)
            if list(other.slots) != list(own.slots):
                own.faults.append(f"rank {rank}: its slots are not those of rank 0")
        return own

    def idle(self) -> None:
        """Say that there is nothing to do, if nothing was said for a while."""
        if time.monotonic() - self._told >= _IDLE_SECONDS:
            self._tell(RankCommand())

    def end(self) -> None:
        """End the other ranks."""
        self._ranks.ending.set()
        self._tell(RankCommand(end=True))

    def _tell(self, command: RankCommand) -> None:
        command.drawn.extend(self._runner.take_drawn())
        self._ranks.broadcast(command.SerializeToString())
        self._told = time.monotonic()


def follow(runner: Runner, ranks: Ranks) -> None:
    """Be another rank than 0, until rank 0 says that it is the end.

    Raises:
        PlanError: a plan can't be run.
        ExecutorError: a rank is gone.
    """
    while True:
        try:
            command = RankCommand.FromString(ranks.broadcast(None))
        except DecodeError as error:
            raise ExecutorError("rank 0 sent what is no command") from error
        runner.draw_as(command.drawn)
        kind = command.WhichOneof("command")
        if kind == "plan":
            runner.follow(command.plan)
        elif kind == "reset":
            runner.reset()
        elif kind == "inspect":
            ranks.collect(runner.inspect(command.inspect).SerializeToString())
        elif kind == "end":
            ranks.ending.set()
            return
