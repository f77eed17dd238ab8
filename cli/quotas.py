"""The admin API about tenants' quotas, for people and programs."""

import click

from cli.calls import admin_client, admin_command, plain, plain_list, print_json
from cli.options import WholeRange

_COUNT = WholeRange(0, 2**32 - 1)


@click.group(invoke_without_command=True)
@admin_command
@click.pass_context
def quotas(context: click.Context, admin_server: str, tenant: str, as_json: bool) -> None:
    """Show the tenants' quotas and what they use, or set one.

    They are kept in the memory manager's process alone: one that is started again, by hand or by its supervisor, has none
    until they are set again.
    """
    if context.invoked_subcommand is not None:
        return
    with admin_client(admin_server, tenant) as client:
        found = client.quotas()
    if as_json:
        print_json(plain_list(found))
        return
    from cli.tables import show_quotas

    show_quotas(found)


@quotas.command("set")
@click.argument("of_tenant", metavar="TENANT")
@click.option("--max-blocks", type=_COUNT, help="The most blocks that it may hold at once; 0: no limit.")
@click.option("--guaranteed-blocks", type=_COUNT, help="Blocks that are kept back for it, while it does not hold so many.")
@click.option("--max-running", type=_COUNT, help="The most of its sequences that may run at once; 0: no limit.")
@admin_command
def set_quota(
    of_tenant: str,
    max_blocks: int | None,
    guaranteed_blocks: int | None,
    max_running: int | None,
    admin_server: str,
    tenant: str,
    as_json: bool,
) -> None:
    """Set a tenant's quota in place of the one before.

    What is not named is 0; one that is 0 in all, as after `--max-blocks 0` alone, is taken away. A quota outlives executors,
    and is gone when the memory manager ends.
    """
    if max_blocks is guaranteed_blocks is max_running is None:
        raise click.UsageError(
            "one of --max-blocks, --guaranteed-blocks and --max-running is needed; --max-blocks 0 alone takes the quota away"
        )
    with admin_client(admin_server, tenant) as client:
        quota = client.set_quota(of_tenant, max_blocks or 0, guaranteed_blocks or 0, max_running or 0)
    if as_json:
        print_json(plain(quota))
        return
    from cli.tables import show_quotas

    show_quotas([quota])
