"""`kilburn up`: an instance on this machine, from nothing to ready to nothing.

Joins the parts: the folder and its lock, the ports, the model, supervisord, and the wait for a first answer.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from signal import SIGCHLD
from typing import TYPE_CHECKING, Final

import click

from cli.options import ServerOptions, server_options
from cli.services import ROLES
from kilburn.errors import StartError
from kilburn.models import find_model
from kilburn.wire import endpoints

if TYPE_CHECKING:
    from cli.signals import Signals
    from cli.supervision import Supervision

#: Between two looks at a starting instance.
_STARTING_POLL_SECONDS: Final = 0.2

#: Between two looks at a running one; a dead supervisord or a stop signal is seen at once.
_RUNNING_POLL_SECONDS: Final = 2.0

#: A fetch that was told to stop removes what it has begun; one that does not is killed, and the next one removes it.
_FETCH_STOP_SECONDS: Final = 10.0


@click.command()
@server_options
@click.pass_context
def up(context: click.Context, options: ServerOptions) -> None:
    """Run all three services, supervised."""
    from cli import leftovers, lifeline
    from cli.ports import KeptPorts
    from cli.signals import STOPS, Signals

    if lifeline.supervised():
        lifeline.follow_parent()
    with ExitStack() as stack:
        _check_journal(options.journal)
        runtime_dir = endpoints.private_dir(options.runtime_dir)
        endpoints.private_dir(endpoints.socket_dir(runtime_dir))
        stack.callback(leftovers.remove_folders, runtime_dir)
        stack.enter_context(endpoints.lock(runtime_dir, "up"))
        ports = stack.enter_context(KeptPorts())
        options = replace(options, listen=ports.keep(options.listen, "--listen"), admin=ports.keep(options.admin, "--admin"))
        leftovers.remove(options)
        stack.callback(leftovers.remove, options)
        signals = stack.enter_context(Signals(STOPS | {SIGCHLD}))
        if find_model(options.model) is None and not _fetch(options.model, signals):
            context.exit(2)
        _run(options, signals)


def _check_journal(journal: Path | None) -> None:
    """See that memmgr will be able to open its journal, before anything is started.

    Raises:
        StartError: it can't.
    """
    if journal is None:
        return
    if not journal.parent.is_dir():
        raise StartError(f"--journal {journal}: there is no folder {journal.parent}")
    if not os.access(journal if journal.exists() else journal.parent, os.W_OK):
        raise StartError(f"--journal {journal}: it can't be written")


def _fetch(model: str, signals: "Signals") -> bool:
    """Fetch a model in a process of its own, so that torch does not stay in this one. False: it failed, and has said why."""
    from cli import lifeline

    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "fetch", model],
        env=lifeline.environment_of_child(),
        stdout=subprocess.DEVNULL,  # it prints the folder; ours has the ready line alone
        process_group=0,
    )
    while process.poll() is None:
        if signals.wait(_RUNNING_POLL_SECONDS) not in (None, SIGCHLD):
            process.terminate()
            try:
                process.wait(_FETCH_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise click.Abort
    return process.returncode == 0


def _run(options: ServerOptions, signals: "Signals") -> None:
    """Keep the services running until a signal comes.

    Raises:
        StartError: one of them can't be kept running, for a reason that would come again.
    """
    from cli.supervision import Supervision

    supervision = Supervision(options, sys.stderr.buffer)
    ready = False
    try:
        while True:
            if not ready and (model := _serving_model(options)):
                ready = True
                print(f"ready: gateway {options.listen}, admin {options.admin}, model {model}", flush=True)
            if signals.wait(_RUNNING_POLL_SECONDS if ready else _STARTING_POLL_SECONDS) not in (None, SIGCHLD):
                return
            _check(options, supervision)
    finally:
        _stop(supervision, signals)


def _serving_model(options: ServerOptions) -> str | None:
    """Return the name of the model if a request would succeed now."""
    import grpc

    from cli import ready
    from kilburn.v1 import inference_pb2, inference_pb2_grpc

    target = ready.reachable(options.listen)
    if not (options.runtime_dir / "gateway.address").is_file() or ready.grpc_health(target):
        return None
    with grpc.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            return stub.GetModel(inference_pb2.GetModelRequest(), timeout=ready.CALL_TIMEOUT_SECONDS).name
        except grpc.RpcError:
            return None  # it stopped serving between the two calls


def _check(options: ServerOptions, supervision: "Supervision") -> None:
    for role in ROLES:
        failed = options.runtime_dir / f"{role}.failed"
        if failed.is_file():
            raise StartError(f"{role}: {failed.read_text(encoding='utf-8')}")
    if not supervision.alive():
        raise StartError("supervisord has ended; the log above says why")
    given_up = supervision.given_up()
    if given_up:
        raise StartError(f"{', '.join(given_up)}: ends at each start; the log above says why")


def _stop(supervision: "Supervision", signals: "Signals") -> None:
    """End everything: in order, or at once after a second signal or too long a time."""
    from cli.supervision import STOP_TIMEOUT_SECONDS

    supervision.begin_stop()
    give_up = time.monotonic() + STOP_TIMEOUT_SECONDS
    while supervision.alive() and time.monotonic() < give_up:
        if signals.wait(_STARTING_POLL_SECONDS) not in (None, SIGCHLD):
            break
    supervision.kill()
