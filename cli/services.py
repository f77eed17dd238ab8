"""The three services, one command each: what `kilburn up` supervises and compose.yaml runs."""

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

    def run() -> None:
        from executor.fetch import ensure_model
        from executor.service import run as serve

        ensure_model(options.model)
        serve(options.executor())

    _serve("executor", options, run)


@click.command()
@server_options
def gateway(options: ServerOptions) -> None:
    """Run the gateway alone."""

    def run() -> None:
        from gateway.service import run as serve

        serve(options.gateway())

    _serve("gateway", options, run)


def _serve(role: str, options: ServerOptions, run: Callable[[], None]) -> None:
    """Run a service. Under `kilburn up` its StartError is left in a file: `up` ends with that line, and tries no second time."""
    if not lifeline.supervised():
        run()
        return
    lifeline.follow_parent()
    try:
        run()
    except StartError as error:
        reason = endpoints.private_dir(options.runtime_dir) / f"{role}.failed"
        whole = reason.with_suffix(".partial")
        whole.write_text(str(error), encoding="utf-8")
        whole.rename(reason)
        sys.exit(2)
