"""What the viewing commands print: tables for people, one JSON value for programs."""

import json
from io import StringIO

from google.protobuf import json_format
from rich.console import Console

from cli.calls import plain
from cli.tables import (
    show_blocks,
    show_event,
    show_event_columns,
    show_pins,
    show_pool,
    show_prefixes,
    show_probe,
    show_quotas,
    show_sequences,
)
from kilburn.v1 import admin_pb2, inference_pb2

POOL = admin_pb2.Pool(
    block_size=16,
    total_blocks=10,
    free_blocks=7,
    live_blocks=2,
    cached_blocks=1,
    live_tokens=2**53 + 1,
    counters=admin_pb2.Counters(preemptions=3),
    memmgr_incarnation="00ff",
)
SEQUENCE = admin_pb2.Sequence(
    request_id="[red]id[/red]",
    tenant="default",
    state=admin_pb2.SEQUENCE_STATE_DECODE,
    prompt_tokens=20,
    block_count=2,
    table=[
        admin_pb2.TableEntry(logical=0, block=41, filled=16, references=2),
        admin_pb2.TableEntry(logical=1, block=7, filled=4),
    ],
)


def printed(color_system: str | None = None) -> tuple[Console, StringIO]:
    out = StringIO()
    console = Console(file=out, width=200, force_terminal=color_system is not None)
    return console, out


def test_json_has_the_protos_names_all_fields_and_whole_numbers() -> None:
    value = json.loads(json.dumps(plain(POOL)))
    assert set(value) == {field.name for field in POOL.DESCRIPTOR.fields} - {"step_totals"}
    assert value["live_tokens"] == 2**53 + 1
    assert value["counters"]["preemptions"] == 3
    assert value["pinned_blocks"] == 0
    assert json_format.ParseDict(value, admin_pb2.Pool()) == POOL


def test_json_of_lists_and_nested_messages() -> None:
    usage = inference_pb2.Usage(prompt_tokens=5)
    response = inference_pb2.GenerateResponse(token_ids=[1, 2], usage=usage)
    value = plain(response)
    assert value["token_ids"] == [1, 2]
    assert value["usage"] == plain(usage)
    assert plain(SEQUENCE)["state"] == "SEQUENCE_STATE_DECODE"


def test_the_pool_for_people() -> None:
    console, out = printed()
    show_pool(POOL, console)
    text = out.getvalue()
    assert "10 of 16 tokens" in text
    for word in ("free", "live", "cached", "preemptions"):
        assert word in text


def test_where_there_is_nothing() -> None:
    console, out = printed()
    show_sequences([], console)
    assert out.getvalue() == "no sequences\n"
    show_pool(admin_pb2.Pool(counters=admin_pb2.Counters(steps=7)), console)
    assert "no executor is connected, so there is no pool\n" in out.getvalue()
    assert "utilization" not in out.getvalue()
    show_pool(admin_pb2.Pool(total_blocks=4, free_blocks=4, utilization=1, contiguous_utilization=1), console)
    assert ["utilization", "│", "-"] in [line.split() for line in out.getvalue().splitlines()]


def test_a_block_table_for_people_takes_no_markup_from_a_request() -> None:
    console, out = printed()
    show_sequences([SEQUENCE], console)
    text = out.getvalue()
    assert text.count("[red]id[/red]") == 2
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["0", "│", "41", "│", "16", "│", "2"],
        ["1", "│", "7", "│", "4", "│", "0"],
    ]


def test_blocks_for_people() -> None:
    console, out = printed()
    show_blocks([admin_pb2.Block(block=1), admin_pb2.Block(block=2, generation=1, idle_seconds=2)], console)
    never_used, used = out.getvalue().splitlines()[2:]
    assert " s " not in never_used
    assert "2.0 s" in used
    block = admin_pb2.Block(block=3, state=admin_pb2.BLOCK_STATE_LIVE, prefix_hash=bytes(range(32)), holders=["default/a/0"])
    show_blocks([block], console)
    assert "000102030405" in out.getvalue()
    assert "default/a/0" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_colours_only_on_a_terminal() -> None:
    console, out = printed("standard")
    show_sequences([SEQUENCE], console)
    assert "\x1b[" in out.getvalue()


def test_prefixes_events_probes_and_pins_for_people() -> None:
    console, out = printed()
    nodes = [admin_pb2.PrefixNode(prefix_hash=b"\x01" * 16), admin_pb2.PrefixNode(prefix_hash=b"\x02" * 16, depth=1, pinned=True)]
    show_prefixes(nodes, console)
    event = admin_pb2.Event(cursor=9, kind=admin_pb2.EVENT_KIND_COPIED, block=0, source=3, request_id="[b]", tenant="t", lost=2)
    show_event_columns(console)
    show_event(event, console)
    show_probe(admin_pb2.ProbeResponse(fits_now=True, evicted_blocks=[4, 5]), console)
    show_pins([admin_pb2.Pin(pin_id="a-1", tokens=32, blocks=2), admin_pb2.Pin(expires_in_seconds=2)], console)
    text = out.getvalue()
    columns = next(line for line in text.splitlines() if line.split()[:5] == ["cursor", "time", "step", "event", "block"])
    line = next(line for line in text.splitlines() if "copied" in line)
    assert columns.index("event") == line.index("copied")
    assert columns.index("block") + len("block") == line.index(" from 3")
    for part in (
        "  02020202",
        "copied",
        "from 3",
        "t/[b]/0",
        "2 events before it are lost",
        "evicts blocks │ 4, 5",
        "never",
        "in 2.0 s",
    ):
        assert part in text


def test_quotas_for_people() -> None:
    console, out = printed()
    show_quotas(
        [admin_pb2.Quota(tenant="[b]a", max_blocks=1200, used_blocks=7), admin_pb2.Quota(tenant="b", max_running=3)], console
    )
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[2] == ["[b]a", "│", "7", "│", "0", "│", "1,200", "│", "no", "limit"]
    assert lines[3] == ["b", "│", "0", "│", "0", "│", "no", "limit", "│", "3"]
