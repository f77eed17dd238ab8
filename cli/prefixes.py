"""The admin API about prefixes and events, for people and programs: the tree, a live log, a block's history, dry runs, pins."""

from typing import TYPE_CHECKING, Final

import click

from cli.calls import admin_client, admin_command, gateway_client, plain, plain_list, print_json, server_option
from cli.options import NumberRange, WholeRange, together

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS: Final = (
    *("allocated", "shared", "copied", "released", "indexed", "evicted", "freed", "preempted"),
    *("swapped_out", "swapped_in", "recovered", "flushed", "pinned", "unpinned", "started"),
)


class _Ids(click.ParamType[list[int]]):
    name = "ids"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        words = str(value).replace(",", " ").split()
        if not words or not all(word.isascii() and word.isdigit() and int(word) < 2**32 for word in words):
            self.fail(f"{value!r} is no list of token ids, as 1,2,3", param, ctx)
        return [int(word) for word in words]


_prefix_options: Final = together(
    click.option("--text", help="The prefix as text; the gateway turns it into ids."),
    click.option("--ids", type=_Ids(), help="The prefix as token ids: 1,2,3."),
    click.option("--of-tenant", default="", help="Whose prefix; else the caller's."),
    click.option("--cache-salt", default="", help="Prefixes are shared only under the same salt."),
)


@click.command()
@admin_command
@click.option("--of-tenant", default="", help="Only this tenant's; else all.")
@click.option("--max-depth", type=WholeRange(0, 2**32 - 1), default=0, help="So many blocks from the root; 0: all.")
@click.option("--max-nodes", type=WholeRange(0, 2**32 - 1), default=0, help="At most so many nodes; 0: all.")
@click.option("--with-tokens", is_flag=True, help="With the token ids of each block.")
def prefixes(
    admin_server: str, tenant: str, as_json: bool, of_tenant: str, max_depth: int, max_nodes: int, with_tokens: bool
) -> None:
    """Show the tree of cached prefixes."""
    with admin_client(admin_server, tenant) as client:
        nodes = client.prefixes(of_tenant, max_depth, max_nodes, with_tokens)
    if as_json:
        print_json(plain_list(nodes))
        return
    from cli.tables import show_prefixes

    show_prefixes(nodes)


@click.command()
@admin_command
@click.option("--cursor", type=WholeRange(0, 2**64 - 1), default=0, help="Go on after this event; 0: from now on.")
@click.option("--from-oldest", is_flag=True, help="From the oldest event that is held.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(_KINDS), help="Only these; may be repeated.")
def events(admin_server: str, tenant: str, as_json: bool, cursor: int, from_oldest: bool, kinds: tuple[str, ...]) -> None:
    """Follow what happens to blocks, until Ctrl-C.

    --json prints one object a line.
    """
    from cli.tables import show_event, show_event_columns
    from kilburn.v1.admin_pb2 import EventKind

    wanted = [EventKind.Value(f"EVENT_KIND_{kind.upper()}") for kind in kinds]
    with admin_client(admin_server, tenant) as client:
        first = True
        for event in client.events(cursor, from_oldest, wanted):
            if as_json:
                print_json(plain(event))
            else:
                if first:
                    show_event_columns()
                    first = False
                show_event(event)


@click.command()
@click.argument("block", type=WholeRange(0, 2**32 - 1))
@admin_command
def explain(block: int, admin_server: str, tenant: str, as_json: bool) -> None:
    """Show why a block is alive, or why it was evicted."""
    with admin_client(admin_server, tenant) as client:
        history = client.explain(block)
    if as_json:
        print_json(plain(history))
        return
    from cli.tables import show_blocks, show_event, show_event_columns

    show_blocks([history.block])
    click.echo()
    if history.events:
        show_event_columns()
    for event in history.events:
        show_event(event)


@click.command()
@_prefix_options
@click.option("--max-tokens", type=WholeRange(0, 2**32 - 1), default=0, help="0: up to the context length.")
@click.option("--n", type=WholeRange(1, 2**32 - 1), default=1, show_default=True, help="Sequences.")
@server_option
@admin_command
def probe(
    text: str | None,
    ids: list[int] | None,
    of_tenant: str,
    cache_salt: str,
    max_tokens: int,
    n: int,
    server: str,
    admin_server: str,
    tenant: str,
    as_json: bool,
) -> None:
    """Ask whether a prompt would fit now, and what it would evict; nothing is changed."""
    tokens = _tokens(text, ids, server, tenant)
    with admin_client(admin_server, tenant) as client:
        answer = client.probe(tokens, max_tokens, n, of_tenant, cache_salt)
    if as_json:
        print_json(plain(answer))
        return
    from cli.tables import show_probe

    show_probe(answer)


@click.command()
@_prefix_options
@click.option(
    "--ttl",
    type=NumberRange(0),
    default=0.0,
    help="Seconds that a new pin lasts, ten years at most; 0: until it is unpinned.",
)
@click.option("--unpin", help="End the pin of this id.")
@server_option
@admin_command
def pins(
    text: str | None,
    ids: list[int] | None,
    of_tenant: str,
    cache_salt: str,
    ttl: float,
    unpin: str | None,
    server: str,
    admin_server: str,
    tenant: str,
    as_json: bool,
) -> None:
    """Show the pins; with --text or --ids, pin what is cached of that prefix first."""
    if unpin is not None and (text is not None or ids is not None):
        raise click.UsageError("--unpin excludes --text and --ids")
    tokens = _tokens(text, ids, server, tenant) if text is not None or ids is not None else []
    with admin_client(admin_server, tenant) as client:
        if unpin is not None:
            client.unpin(unpin)
        found = [client.pin(tokens, ttl, of_tenant, cache_salt)] if tokens else client.pins()
    if as_json:
        print_json(plain(found[0]) if tokens else plain_list(found))
        return
    from cli.tables import show_pins

    show_pins(found)


def _tokens(text: str | None, ids: list[int] | None, server: str, tenant: str) -> "Sequence[int]":
    if text is None and ids is None:
        raise click.UsageError("one of --text and --ids is needed")
    if text is not None and ids is not None:
        raise click.UsageError("--text and --ids exclude each other")
    if ids is not None:
        return ids
    assert text is not None
    with gateway_client(server, tenant) as client:
        return client.tokenize(text)
