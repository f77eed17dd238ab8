"""`kilburn health`: one process's health as an exit status, for health checks of containers."""

import sys
import time
from pathlib import Path

import click

from cli.options import network_options
from cli.services import ROLES
from kilburn.config import Address


@click.command()
@click.argument("role", type=click.Choice(ROLES))
@network_options
def health(role: str, listen: Address, admin: Address, runtime_dir: Path) -> None:
    """Say whether one service is healthy.

    Exits with 0 if it is, else says why not and exits with 1.
    """
    from cli.ready import NOTHING_ANSWERS, executor_health, grpc_health, listening

    if role == "executor":
        reason = executor_health(runtime_dir, time.time())
    elif role == "memmgr":
        reason = grpc_health(listening(admin, runtime_dir / "admin.address"))
    else:
        reason = grpc_health(listening(listen, runtime_dir / "gateway.address"))
    if reason:
        flag = "--listen" if role == "gateway" else "--admin"
        hint = f"; `kilburn up` starts one, {flag} says where another one is" if reason.startswith(NOTHING_ANSWERS) else ""
        click.echo(f"kilburn: {role}: {reason}{hint}", err=True)
        sys.exit(1)
