"""Starts the ranks of a tensor-parallel executor with torchrun's launcher, and ends with them.

Knows torchrun, not what a rank does. This process is the executor for whoever supervises it: it holds the role's lock, passes
the signal to end on, and where one rank dies it ends the others and fails itself. There is no restart here: memmgr has to see
that the executor is another one, and supervisors know how to start it again.
"""

import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from executor.errors import ExecutorError
from executor.ranks import MEETING, meeting_path
from kilburn.errors import StartError
from kilburn.wire.endpoints import lock, private_dir

#: From the signal to the end of all ranks; then they are killed. Less than a supervisor's patience.
_STOP_SECONDS: Final = 10


def failure_path(runtime_dir: Path, rank: int) -> Path:
    """Return where a rank leaves the reason why it can't start."""
    return runtime_dir / f"executor-{rank}.failed"


def launch(world: int, command: Sequence[str], environment: Mapping[str, str], runtime_dir: Path, device: str) -> None:
    """Run `command` as so many ranks until SIGTERM or SIGINT comes.

    Raises:
        StartError: a rank can't start, for the reason that it left in its file.
        ExecutorError: a rank died.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # torchrun's many words: the ranks say what became of them, and what is raised here does
    private_dir(runtime_dir)
    with ExitStack() as stack:
        stack.enter_context(lock(runtime_dir, "executor"))
        meeting, rendezvous = meeting_path(runtime_dir), runtime_dir / "executor.rendezvous"
        reasons = [failure_path(runtime_dir, rank) for rank in range(world)]
        for path in (meeting, rendezvous, *reasons):
            path.unlink(missing_ok=True)
            stack.callback(path.unlink, missing_ok=True)
        os.environ.update(environment)
        os.environ[MEETING] = str(meeting)
        # The launcher shares no store over TCP, and its own is a file: nothing listens.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers takes the GPU for its mesh where it sees one
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=secrets.token_hex(8),
            role="executor",
            rdzv_backend="c10d",
            rdzv_endpoint=str(rendezvous),
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            shutdown_timeout=_STOP_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except SignalException:
            return
        except ChildFailedError as error:
            for path in reasons:
                if path.is_file():
                    raise StartError(path.read_text(encoding="utf-8")) from error
            rank, failure = error.get_first_failure()
            raise ExecutorError(f"rank {rank} of the executor has died (exit status {failure.exitcode})") from error
