"""The three services, one command each: what `kilburn up` supervises and compose.yaml runs."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import click

from cli import lifeline
from cli.options import ServerOptions, server_options
from kilburn.errors import StartError
from kilburn.wire import endpoints

ROLES: Final = ("memmgr", "executor", "gateway")


@click.command()
@server_options
def memmgr(options: ServerOptions) -> None:
    """Run the memory manager alone."""

    def run() -> None:
        from memmgr.service import run as serve

        serve(options.memmgr())

    _serve("memmgr", options, run)


@click.command()
@server_options
def executor(options: ServerOptions) -> None:
    """Run the executor alone."""

    if options.tensor_parallel > 1 and not _is_rank():
        _serve("executor", options, lambda: _launch_ranks(options))
        return

    def run() -> None:
        from executor.fetch import ensure_model
        from executor.service import run as serve

        ensure_model(options.model)
        serve(options.executor())

    # Ranks may wait for one another in native code, where no other signal is noticed.
    role, end = (f"executor-{os.environ['RANK']}", signal.SIGKILL) if _is_rank() else ("executor", signal.SIGTERM)
    _serve(role, options, run, end)


def _is_rank() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ  # executor.ranks.is_rank(), without torch


def _launch_ranks(options: ServerOptions) -> None:
    """Run as many executors as there are ranks, all with these options."""
    from cli.supervision import environment
    from executor.fetch import ensure_model
    from executor.launch import launch

    ensure_model(options.model)  # once, before there are several
    launch(
        options.tensor_parallel,
        ["-m", "cli", "executor"],
        environment(options) | {lifeline.SUPERVISED: str(os.getpid())},
        options.runtime_dir,
        options.device,
    )


@click.command()
@server_options
def gateway(options: ServerOptions) -> None:
    """Run the gateway alone."""

    def run() -> None:
        from gateway.service import run as serve

        serve(options.gateway())

    _serve("gateway", options, run)


def _serve(role: str, options: ServerOptions, run: Callable[[], None], end: signal.Signals = signal.SIGTERM) -> None:
    """Run a service. Under `kilburn up` its StartError is left in a file: `up` ends with that line, and tries no second time."""
    if not lifeline.supervised():
        run()
        return
    lifeline.follow_parent(end)
    try:
        run()
    except StartError as error:
        reason = endpoints.private_dir(options.runtime_dir) / f"{role}.failed"
        whole = reason.with_suffix(".partial")
        whole.write_text(str(error), encoding="utf-8")
        whole.rename(reason)
        sys.exit(2)
