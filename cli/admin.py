"""The admin API for people and programs: the pool, its sequences and its blocks, as tables or as JSON."""

import sys
from typing import Final

import click

from cli.calls import admin_client, admin_command, plain, plain_list, print_json
from cli.options import WholeRange

_SEQUENCE_STATES: Final = ("waiting", "prefill", "decode", "swapped", "finished")
_BLOCK_STATES: Final = ("free", "live", "cached")


@click.command()
@admin_command
def pool(admin_server: str, tenant: str, as_json: bool) -> None:
    """Show the pool and the counters.

    Tokens are held as planned: those of steps under way count. Decode tokens are counted as sequences end, since only then is
    it known which are kept.
    """
    with admin_client(admin_server, tenant) as client:
        answer = client.pool()
    if as_json:
        print_json(plain(answer))
        return
    from cli.tables import show_pool

    show_pool(answer)


@click.command()
@admin_command
@click.option("--state", type=click.Choice(_SEQUENCE_STATES), help="Only sequences in this state.")
@click.option("--of-tenant", default="", help="Only this tenant's; else all.")
@click.option("--table", "tables", is_flag=True, help="With each sequence's block table.")
@click.option("--request-id", help="Only this request's sequence, with its block table.")
@click.option("--index", type=WholeRange(0), default=0, show_default=True, help="Which of that request's sequences.")
def sequences(
    admin_server: str,
    tenant: str,
    as_json: bool,
    state: str | None,
    of_tenant: str,
    tables: bool,
    request_id: str | None,
    index: int,
) -> None:
    """Show the sequences and their block tables.

    In a table, `filled` counts the slots that steps under way are writing to, too; `computed` counts acknowledged tokens alone.
    """
    if request_id is not None and state is not None:
        raise click.UsageError("--request-id and --state exclude each other")
    from kilburn.v1.admin_pb2 import SequenceState

    wanted = SequenceState.Value(f"SEQUENCE_STATE_{(state or 'unspecified').upper()}")
    with admin_client(admin_server, tenant) as client:
        if request_id is not None:
            found = [client.sequence(request_id, index, of_tenant)]
        else:
            found = client.sequences(wanted, of_tenant, tables)
    if as_json:
        print_json(plain(found[0]) if request_id is not None else plain_list(found))
        return
    from cli.tables import show_sequences

    show_sequences(found)


@click.command()
@admin_command
@click.option("--state", type=click.Choice(_BLOCK_STATES), help="Only blocks in this state.")
@click.option("--min-references", type=WholeRange(0), default=0, help="Only blocks with so many references or more.")
@click.option("--first", type=WholeRange(0), default=0, show_default=True, help="From this block on.")
@click.option("--limit", type=WholeRange(0), default=0, help="At most so many; 0: all.")
def blocks(admin_server: str, tenant: str, as_json: bool, state: str | None, min_references: int, first: int, limit: int) -> None:
    """Show the physical blocks and their holders.

    `filled` counts the slots that steps under way are writing to, too.
    """
    from kilburn.v1.admin_pb2 import BlockState

    wanted = BlockState.Value(f"BLOCK_STATE_{(state or 'unspecified').upper()}")
    with admin_client(admin_server, tenant) as client:
        found = client.blocks(wanted, min_references, first, limit)
    if as_json:
        print_json(plain_list(found))
        return
    from cli.tables import show_blocks

    show_blocks(found)


@click.command()
@admin_command
@click.option(
    "--with-executor/--without-executor", default=True, show_default=True, help="Compare with what the executor holds, too."
)
def verify(admin_server: str, tenant: str, as_json: bool, with_executor: bool) -> None:
    """Check every invariant of the memory.

    Exits with 1 where one does not hold.
    """
    with admin_client(admin_server, tenant) as client:
        answer = client.verify(with_executor)
    if as_json:
        print_json(plain(answer))
    else:
        for fault in answer.faults:
            click.echo(fault)
        scope = "the executor's view compared" if with_executor else "the executor not asked"
        if not answer.checks:
            scope = "nothing was there to be checked or compared"
        click.echo(f"{_count(answer.checks, 'check')}, {_count(len(answer.faults), 'fault')}; {scope}")
    if not answer.ok:
        sys.exit(1)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@click.command()
@click.argument("request_id")
@click.option("--of-tenant", default="", help="Whose request; else the caller's.")
@admin_command
def cancel(request_id: str, of_tenant: str, admin_server: str, tenant: str, as_json: bool) -> None:
    """End a request.

    Exits with 1 where there is none of that id.
    """
    with admin_client(admin_server, tenant) as client:
        answer = client.cancel_request(request_id, of_tenant)
    if as_json:
        print_json(plain(answer))
    elif not answer.found:
        click.echo(f"kilburn: there is no live request {request_id}", err=True)
    if not answer.found:
        sys.exit(1)
