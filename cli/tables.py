"""Answers of the admin API as tables for people: coloured on a terminal, plain text elsewhere."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kilburn.v1 import admin_pb2

_STATE_COLOURS = {"live": "green", "cached": "blue", "decode": "green", "prefill": "yellow", "waiting": "magenta"}

_EVENT_COLOURS = {"allocated": "green", "shared": "green", "indexed": "blue", "evicted": "red", "preempted": "magenta"}


def show_pool(pool: admin_pb2.Pool, console: Console | None = None) -> None:
    """Print the pool's counts and the counters beside them."""
    facts: dict[str, str] = {
        "blocks": f"{pool.total_blocks:,} of {pool.block_size} tokens, {_bytes(pool.bytes_per_block)} each",
        "free": f"{pool.free_blocks:,}",
        "live": f"{pool.live_blocks:,} ({pool.shared_blocks:,} shared)",
        "cached": f"{pool.cached_blocks:,} ({pool.pinned_blocks:,} pinned)",
        "tokens": f"{pool.live_tokens:,} held, {pool.logical_tokens:,} with shared ones counted for each holder",
        "utilization": f"{pool.utilization:.1%} of the live blocks' slots; reserving ahead would give "
        f"{pool.contiguous_utilization:.1%}"
        if pool.live_blocks
        else "-",
        "sequences": f"{pool.running:,} running, {pool.waiting:,} waiting, {pool.swapped:,} swapped",
        "connected": f"executor {'yes' if pool.executor_connected else 'no'}, gateways {pool.gateways_connected}",
        "step": f"{pool.step:,}",
    }
    table = Table("pool", "", show_edge=False, pad_edge=False)
    for name, fact in facts.items():
        table.add_row(name, fact)
    counters = Table("counter", "", show_edge=False, pad_edge=False)
    counters.columns[1].justify = "right"
    for field in admin_pb2.Counters.DESCRIPTOR.fields:
        counters.add_row(field.name.replace("_", " "), f"{getattr(pool.counters, field.name):,}")
    console = console or _console()
    if not pool.executor_connected and not pool.total_blocks:
        console.print("no executor is connected, so there is no pool", soft_wrap=True)
    else:
        console.print(table)
    console.print()
    console.print(counters)


def show_sequences(sequences: Sequence[admin_pb2.Sequence], console: Console | None = None) -> None:
    """Print one line for each sequence, then the block tables that they came with."""
    table = Table(
        *("request", "index", "tenant", "state", "prompt", "output", "computed", "cached", "blocks", "priority", "age"),
        show_edge=False,
        pad_edge=False,
    )
    for column in table.columns[4:]:
        column.justify = "right"
    for sequence in sequences:
        numbers = (sequence.prompt_tokens, sequence.output_tokens, sequence.computed_tokens, sequence.cached_tokens)
        table.add_row(
            Text(sequence.request_id),
            str(sequence.index),
            Text(sequence.tenant),
            _state(admin_pb2.SequenceState.Name(sequence.state)),
            *(f"{number:,}" for number in (*numbers, sequence.block_count)),
            str(sequence.priority),
            f"{sequence.age_seconds:.1f} s",
        )
    console = console or _console()
    console.print(table if sequences else "no sequences")
    for sequence in sequences:
        if sequence.table:
            console.print()
            show_block_table(sequence, console)


def show_block_table(sequence: admin_pb2.Sequence, console: Console | None = None) -> None:
    """Print one sequence's block table, in logical order."""
    table = Table("logical", "physical", "filled", "references", show_edge=False, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for entry in sequence.table:
        where = f"{entry.block} (host)" if entry.on_host else str(entry.block)
        table.add_row(str(entry.logical), where, str(entry.filled), str(entry.references))
    console = console or _console()
    console.print(Text(f"block table of {sequence.request_id}/{sequence.index}"))
    console.print(table)


def show_blocks(blocks: Sequence[admin_pb2.Block], console: Console | None = None) -> None:
    """Print one line for each physical block."""
    table = Table(
        *("block", "state", "references", "filled", "prefix", "depth", "pinned", "tenant", "idle", "generation", "holders"),
        show_edge=False,
        pad_edge=False,
    )
    for block in blocks:
        table.add_row(
            str(block.block),
            _state(admin_pb2.BlockState.Name(block.state)),
            str(block.references),
            str(block.filled),
            block.prefix_hash.hex()[:12],
            str(block.depth) if block.prefix_hash else "",
            "pinned" if block.pinned else "",
            Text(block.tenant),
            f"{block.idle_seconds:.1f} s" if block.generation else "",
            str(block.generation),
            Text(", ".join(block.holders)),
        )
    (console or _console()).print(table)


def show_prefixes(nodes: Sequence[admin_pb2.PrefixNode], console: Console | None = None) -> None:
    """Print the tree, one line for each node, indented by its depth."""
    table = Table("prefix", "block", "references", "hits", "pinned", "tokens", show_edge=False, pad_edge=False)
    for node in nodes:
        table.add_row(
            Text("  " * min(node.depth, 32) + node.prefix_hash.hex()[:12]),
            str(node.block),
            str(node.references),
            f"{node.hits:,}",
            "pinned" if node.pinned else "",
            " ".join(map(str, node.token_ids)),
        )
    (console or _console()).print(table)


def show_event_columns(console: Console | None = None) -> None:
    """Print the names of what stands in an event's line; what an event lacks is left out in its line, but for the block."""
    columns = f"{'cursor':>9} {'time':<15} {'step':>8} {'event':<11} {'block':>8} from, holder, prefix"
    (console or _console()).print(Text(columns), soft_wrap=True)


def show_event(event: admin_pb2.Event, console: Console | None = None) -> None:
    """Print one event on one line."""
    kind = admin_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower()
    line = Text(f"{event.cursor:>9} {datetime.fromtimestamp(event.unix_time):%H:%M:%S.%f} {event.step:>8} ")
    line.append(f"{kind:<11}", style=_EVENT_COLOURS.get(kind, ""))
    line.append(f" {event.block:>8}" if event.HasField("block") else " " * 9)
    if event.HasField("source"):
        line.append(f" from {event.source}")
    if event.request_id:
        line.append(f" {event.tenant}/{event.request_id}/{event.index}")
    if event.prefix_hash:
        line.append(f" {event.prefix_hash.hex()[:12]}")
    if event.lost:
        line.append(f" ({event.lost:,} events before it are lost)", style="red")
    (console or _console()).print(line, soft_wrap=True)


def show_probe(probe: admin_pb2.ProbeResponse, console: Console | None = None) -> None:
    """Print what would become of a request."""
    table = Table("probe", "", show_edge=False, pad_edge=False)
    table.add_row("fits now", "yes" if probe.fits_now else "no")
    table.add_row("fits ever", "yes" if probe.fits_ever else "no")
    table.add_row("cached", f"{probe.cached_tokens:,} tokens")
    table.add_row("new blocks", f"{probe.new_blocks:,} for the prompt, {probe.worst_case_blocks:,} in all at the most")
    table.add_row("evicts blocks", ", ".join(map(str, probe.evicted_blocks)) or "nothing")
    table.add_row("ahead", f"{probe.waiting_ahead:,} requests wait")
    (console or _console()).print(table)


def show_pins(pins: Sequence[admin_pb2.Pin], console: Console | None = None) -> None:
    """Print one line for each pin."""
    table = Table("pin", "tenant", "tokens", "blocks", "expires", show_edge=False, pad_edge=False)
    for pin in pins:
        expires = f"in {pin.expires_in_seconds:.1f} s" if pin.expires_in_seconds else "never"
        table.add_row(Text(pin.pin_id), Text(pin.tenant), f"{pin.tokens:,}", f"{pin.blocks:,}", expires)
    (console or _console()).print(table)


def show_quotas(quotas: Sequence[admin_pb2.Quota], console: Console | None = None) -> None:
    """Print one line for each quota."""
    table = Table("tenant", "used", "guaranteed", "most blocks", "most running", show_edge=False, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for quota in quotas:
        limits = [f"{limit:,}" if limit else "no limit" for limit in (quota.max_blocks, quota.max_running)]
        table.add_row(Text(quota.tenant), f"{quota.used_blocks:,}", f"{quota.guaranteed_blocks:,}", *limits)
    (console or _console()).print(table)


def _console() -> Console:
    console = Console(highlight=False)
    # What is no terminal has no width: a row stays on its line.
    return console if console.is_terminal else Console(highlight=False, width=1000)


def _state(name: str) -> Text:
    word = name.split("_STATE_")[1].lower()
    return Text(word, style=_STATE_COLOURS.get(word, ""))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
