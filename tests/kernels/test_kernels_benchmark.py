"""The benchmark of the kernels: its cases keep their rules, its contenders compute the same, its verdicts follow the numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from benchmarks import kernels as command
from benchmarks import kernels_cases as cases
from benchmarks import kernels_parts as parts
from benchmarks import kernels_report as report
from benchmarks.figure import Curve, ratio_curves
from benchmarks.kernels_cases import Case, Heads, NoRoomError, Room, room
from benchmarks.kernels_data import Source, difference, noise, queries
from benchmarks.kernels_peers import Contiguous
from benchmarks.kernels_pools import Paged
from benchmarks.kernels_rounds import Limits, fastest, geometric_mean, measure, ratio
from benchmarks.options import check_writable, help_of, write
from benchmarks.plain_read import reads
from kernels.cpu.library import why_missing
from kernels.reference import ReferenceBackend

ROOT = Path(__file__).resolve().parents[2]
CACHE = 32 * 2**20
LIMIT = 8 * 2**30
EVERY = [
    *((case, 1, True) for case in (*cases.decodes(), *cases.prefills())),
    *((case, 4, False) for case in cases.tables()),
    *((case, 8, False) for curve in cases.block_sizes() for case in curve),
]


def test_the_cases_are_all_that_the_benchmark_promises() -> None:
    decodes = {(case.heads, case.sequences, case.tokens) for case in cases.decodes()}
    assert len(decodes) == len(cases.decodes()) == 3 * 4 * 4
    assert len(cases.prefills()) == 3 * 3
    names = [case.name for case, _, _ in EVERY]
    assert len(set(names)) == len(names)
    assert {*report.SHARES} <= set(names), "a claim about a case that is never measured"


@pytest.mark.parametrize("sparse", [True, False])
def test_all_cases_keep_the_rule_of_memory(*, sparse: bool) -> None:
    for case, pools, peers in EVERY:
        found = room(case, 2, CACHE, LIMIT, pools=pools, peers=peers, sparse=sparse)
        layer = case.layer_bytes(2)
        touched = found.sets * found.layers * layer
        assert touched >= 8 * CACHE, case.name
        assert found.copies * case.read_bytes(2) >= (8 * CACHE if peers else 0)
        assert found.bytes <= LIMIT
        assert found.bytes >= pools * touched + found.copies * case.read_bytes(2)
        assert 1 <= found.layers <= found.frame_layers == (cases.LAYERS if sparse else found.layers)
        assert found.sets == 1 or found.layers == cases.LAYERS, "sets only where all layers of one do not suffice"
        assert touched < 8 * CACHE + cases.LAYERS * layer, "no more than it takes"


def test_a_case_that_does_not_fit_says_so() -> None:
    case = Case(cases.DECODE, 64, 1, 8192, Heads(32, 8, 128))
    with pytest.raises(NoRoomError, match=r"it takes 6\.2 GiB, and the limit is 2\.0"):
        room(case, 2, CACHE, 2 * 2**30)
    assert room(case, 2, CACHE, 7 * 2**30).layers == 1, "one layer is far more than the cache"
    assert room(case, 2, CACHE, 9 * 2**30).layers == 2


def test_a_block_that_is_partly_filled_takes_its_whole_size() -> None:
    case = Case(cases.DECODE, 3, 1, 17, Heads(4, 2, 8))
    assert case.read_bytes(2) == 3 * 17 * 2 * 8 * 2 * 2
    assert case.layer_bytes(2) == 3 * 32 * 2 * 8 * 2 * 2


@pytest.mark.parametrize(("text", "size"), [("32768K\n", 2**25), ("2M", 2**21), ("1G", 2**30), ("512", 512)])
def test_sizes_of_caches(text: str, size: int) -> None:
    assert cases.cache_size(text) == size


def test_weights_are_copied_until_they_leave_the_cache() -> None:
    for weight in cases.WEIGHTS:
        copies = cases.weight_copies(weight, 2, CACHE, LIMIT)
        assert copies * weight.bytes(2) >= 8 * CACHE > (copies - 1) * weight.bytes(2)
    with pytest.raises(NoRoomError):
        cases.weight_copies(cases.WEIGHTS[-1], 2, CACHE, 2**29)


class Scripted:
    """Takes the same time at every call, and notes who had a turn."""

    def __init__(self, name: str, seconds: float, turns: list[tuple[str, int, int]]) -> None:
        self._name, self._seconds, self._turns = name, seconds, turns

    def turn(self, uncounted: int, calls: int) -> list[float]:
        self._turns.append((self._name, uncounted, calls))
        return [self._seconds] * calls


def test_contenders_take_turns_in_both_orders() -> None:
    turns: list[tuple[str, int, int]] = []
    contenders = {"short": Scripted("short", 1e-3, turns), "long": Scripted("long", 1.0, turns)}
    told: list[int] = []
    found = measure(contenders, Limits(rounds=5, seconds=60), lambda: told.append(len(turns)))
    assert found == {"short": [1e-3] * 5, "long": [1.0] * 5}
    assert len(told) == 5
    assert [name for name, _, _ in turns[2:]] == ["short", "long", "long", "short"] * 2 + ["short", "long"]
    assert turns[2:4] == [("short", 3, 10), ("long", 0, 1)], "short ones many times, after some that are not counted"
    assert fastest(contenders) == "short"


def test_a_case_ends_when_its_time_is_over_but_not_before_three_rounds() -> None:
    found = measure({"one": Scripted("one", 1e-3, [])}, Limits(rounds=1000, seconds=0), lambda: None)
    assert len(found["one"]) == 3
    assert len(measure({"one": Scripted("one", 1e-3, [])}, Limits(rounds=2, seconds=0), lambda: None)["one"]) == 2


def test_ratios_are_of_rounds() -> None:
    assert ratio([2, 20, 9], [1, 10, 1]) == 2, "a round that was slow for both is as good as any"
    assert geometric_mean([1, 4]) == pytest.approx(2)


def test_the_noise_is_noise_and_always_the_same() -> None:
    numbers = noise(100_000, 1)
    assert abs(float(numbers.mean())) < 0.02
    assert float(numbers.var()) == pytest.approx(1, abs=0.02)
    assert abs(float((numbers[1:] * numbers[:-1]).mean())) < 0.02
    assert torch.equal(noise(10, 1), numbers[:10])
    assert not torch.equal(noise(10, 2), numbers[:10])


def exact(case: Case) -> Tensor:
    """Compute a case in float64, sequence by sequence."""
    heads, out = case.heads, []
    source = Source(heads.kv_heads, heads.size, case.tokens, torch.float32)
    rows = queries(case.sequences * case.rows, heads.q_heads, heads.size, torch.float32).double()
    hidden = ~torch.ones(case.rows, case.tokens, dtype=torch.bool).tril(case.tokens - case.rows)
    for sequence in range(case.sequences):
        own = rows[sequence * case.rows :][: case.rows].transpose(0, 1)  # [q_heads, rows, size]
        keys, values = (
            part.double().transpose(0, 1).repeat_interleave(heads.group, dim=0) for part in source.rows(sequence, 0, case.tokens)
        )
        scores = (own @ keys.transpose(1, 2) * heads.size**-0.5).masked_fill(hidden, -torch.inf)
        out.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


COMPUTED = [
    Case(cases.DECODE, 3, 1, 48, Heads(6, 2, 16)),
    Case(cases.DECODE, 2, 1, 32, Heads(4, 4, 32), block_size=8),
    Case(cases.PREFILL, 1, 16, 16, Heads(6, 2, 16)),
    Case(cases.PREFILL, 1, 16, 80, Heads(6, 2, 16)),
]


@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_all_contenders_compute_the_same_at_every_call(case: Case) -> None:
    expected = exact(case)
    space, device = Room(frame_layers=3, layers=2, sets=2, copies=3, bytes=0), torch.device("cpu")
    for scattered in (True, False):
        paged = Paged(ReferenceBackend(), case, space, torch.float32, device, scattered=scattered)
        for number in range(2 * space.layers * space.sets):
            assert difference(paged(number), expected) < 1e-5
    contiguous = Contiguous(case, space, torch.float32, device)
    ways = contiguous.ways()
    wanted = {"folded", "products"} if case.part == cases.DECODE else {"grouped", "viewed", "folded"}
    assert set(ways) == wanted | ({"split"} if case.rows < case.tokens and case.part == cases.PREFILL else set())
    for way, call in ways.items():
        gathered = contiguous.gathered(way)
        for number in range(2 * space.copies):
            assert difference(call(number), expected) < 1e-5, way
            assert difference(gathered(number), expected) < 1e-5, way


def test_a_difference_is_seen_and_so_is_what_is_no_number() -> None:
    assert difference(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0])) == pytest.approx(0.2)
    assert not difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0])) <= 1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reads_read_every_word(threads: int) -> None:
    words = torch.zeros(3 * 32 * threads, dtype=torch.int64)
    for read in reads(threads):
        assert read(words) == 0
        for place in range(len(words)):
            words[place] = 1 << place % 61
            assert read(words) == 1 << place % 61
            words[place] = 0


ATTENTION = report.AttentionRow(
    part=cases.DECODE, name="decode 32 x 512 (9, 3, 64)", us=463.1, bytes=12_582_912, gb_s=27.2, share=0.75, share_of_streams=0.6,
    torch_ratio=3.2,
    torch_way="folded", gathered_ratio=8.9, vllm_ratio=2.0, rounds=50,
)  # fmt: skip
PREFILLED = replace(ATTENTION, part=cases.PREFILL, name="prefill 512 on 0 (9, 3, 64)", torch_ratio=1.0, vllm_ratio=None)
TABLE = report.TableRow("table 8 x 512 (9, 3, 64)", 99.0, {report.IN_ORDER: 1.01, report.ONE_RUN: 1.049}, 50)
BLOCKS = report.BlocksRow("blocks 32 x 512 (9, 3, 64)", 32, 460.0, (9.0, 5.0, 3.0, 2.0, 1.02, 1.0, 1.0, 1.01), 50)
PRODUCT = report.ProductRow("qkv 576 -> 960", 8, 35.0, 1_105_920, 31.6, 0.9, 0.75, 2.2, 1.4, 50)


def found(*rows: report.AnyRow | report.Skip) -> report.Report:
    whole = report.Report()
    for row in rows:
        whole.add(row)
    return whole


@pytest.mark.parametrize(
    ("holding", "failing"),
    [
        (ATTENTION, replace(ATTENTION, share=0.749)),
        (ATTENTION, replace(ATTENTION, vllm_ratio=1.99)),
        (PREFILLED, replace(PREFILLED, torch_ratio=0.99)),
        (TABLE, replace(TABLE, ratios={report.IN_ORDER: 1.05, report.ONE_RUN: 1.0})),
        (PRODUCT, replace(PRODUCT, share=0.899)),
    ],
)
def test_a_claim_holds_up_to_its_edge_and_fails_behind_it(holding: report.AnyRow, failing: report.AnyRow) -> None:
    assert all(claim.holds for claim in report.claims(found(holding)))
    assert [claim.holds for claim in report.claims(found(failing))].count(False) == 1
    assert any(str(claim).startswith("FAILS") for claim in report.claims(found(failing)))
    assert not all(claim.holds for claim in report.claims(found(holding, failing))), "one is enough"


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    assert report.claims(found()) == []
    assert report.claims(found(BLOCKS, report.Skip("decode", "no room"))) == []
    assert len(report.claims(found(replace(ATTENTION, name="decode 1 x 128 (9, 3, 64)", vllm_ratio=None)))) == 0


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (report.ATTENTION_COLUMNS, ATTENTION),
        (report.ATTENTION_COLUMNS, PREFILLED),
        (report.TABLE_COLUMNS, TABLE),
        (report.BLOCKS_COLUMNS, BLOCKS),
        (report.PRODUCT_COLUMNS, PRODUCT),
    ],
)
def test_numbers_stand_below_one_another(columns: tuple[str, ...], row: report.AnyRow) -> None:
    cells = row.cells()
    assert len(cells) == len(columns)
    printed = report.line(cells)
    assert len(printed) == len(report.line(columns))
    assert printed.split()[-1] == cells[-1]


def test_curves_are_drawn_to_scale() -> None:
    drawn = [Curve("one", (3.0, 1.0)), Curve("<two>", (1.5, 2.0))]
    svg = ratio_curves(drawn, ["1", "16"], "title", "axis", "below")
    assert svg == ratio_curves(drawn, ["1", "16"], "title", "axis", "below")
    tree = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    heights = [float(dot.attrib["cy"]) for dot in tree.iter(f"{space}circle")]
    base, top = heights[1], heights[0]
    assert [(base - height) / (base - top) * 2 + 1 for height in heights] == [pytest.approx(r) for r in (3, 1, 1.5, 2)]
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert {"title", "axis", "below", "one", "<two>", "1", "16", "3"} <= set(texts)


# The command.

SMALL = ["--attention", "reference", "--cache-mib", "1", "--memory-mib", "320", "--rounds", "1"]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.processes
def test_every_part_runs_and_tells_what_it_left_out(tmp_path: Path) -> None:
    picture = tmp_path / "blocks.svg"
    words = ["--match", " 1 x 512 (9", "--match", "on 0 (9", "--match", "blocks 32", "--match", "qkv"]
    words += ["--match", "decode 64 x 8192 (32", "--threads", "1", "--json", "--svg", str(picture)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", *SMALL, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert [row["name"] for row in answer["attention"]] == ["decode 1 x 512 (9, 3, 64)", "prefill 512 on 0 (9, 3, 64)"]
    for row in answer["attention"]:
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert min(row["share"], row["torch_ratio"], row["gathered_ratio"]) > 0
    assert answer["attention"][0]["bytes"] == 512 * 3 * 2 * 64 * 2
    assert [row["name"] for row in answer["table"]] == ["table 1 x 512 (9, 3, 64)"]
    assert set(answer["table"][0]["ratios"]) == set(report.CONTIGUOUS)
    assert len(answer["blocks"][0]["ratios"]) == len(cases.BLOCK_SIZES)
    assert min(answer["blocks"][0]["ratios"]) == 1
    assert picture.read_text().startswith("<svg")
    assert "decode 64 x 8192 (32, 8, 128)" in [skip["name"] for skip in answer["skipped"]]
    if why_missing():
        assert "products" in [skip["name"] for skip in answer["skipped"]]
    else:
        assert [(row["name"], row["rows"]) for row in answer["products"]] == [("qkv 576 -> 960", rows) for rows in cases.ROWS]
    assert answer["claims"]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("least", "status"), [(0.0, 0), (1e9, 1)])
def test_a_claim_that_fails_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, least: float, status: int) -> None:
    monkeypatch.setitem(report.SHARES, "decode 1 x 128 (9, 3, 64)", least)
    words = [*SMALL, "--only", "decode", "--match", "1 x 128 (9", "--check"]
    done = CliRunner().invoke(command.main, words, catch_exceptions=False)
    assert done.exit_code == status, done.output
    assert ("FAILS" in done.output) == bool(status)
    assert "decode 1 x 128 (9, 3, 64)" in done.output


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--check", "--threads", "1"], "two threads of a CPU"),
        (["--check", "--only", "decode", "--match", "decode 1 x 2048 (9", "--memory-mib", "1"], "nothing was measured"),
        (["--svg", "picture.svg", "--only", "decode"], "--only blocks"),
        (["--svg", "picture.svg", "--match", "qkv"], "--match has to leave some of it"),
        (["--svg", "no such folder/picture.svg"], "picture.svg can't be written: No such file or directory"),
        (["--match", "no such case"], "no case has 'no such case' in its name; there are 'decode 1 x 128 (9, 3, 64)', "),
        (["--match", "qkv", "--match", "prefil 512"], "no case has 'prefil 512' in its name"),
        (["--match", "qkv", "--only", "table"], "there are 'table 1 x 512 (9, 3, 64)', "),
        (["--seconds", "nan"], "nan is no number of seconds"),
        (["--seconds", "inf"], "inf is not in the range 0.01<=x<=3600"),
        (["--device", "cuda", "--vllm-python", sys.executable], "--device cuda needs"),
    ],
)
def test_what_can_not_be_done_is_refused(words: list[str], reason: str) -> None:
    done = CliRunner().invoke(command.main, [*SMALL, *words])
    assert done.exit_code == 2
    assert reason in " ".join(done.output.split())


@pytest.mark.usefixtures("threads")
def test_a_part_without_a_case_has_no_table() -> None:
    words = [*SMALL, "--only", "decode", "--only", "table", "--match", "decode 1 x 128 (9"]
    done = CliRunner().invoke(command.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "decode 1 x 128 (9, 3, 64)" in done.output
    assert report.line(report.TABLE_COLUMNS).strip() not in done.output


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("reason", [parts.WrongError("the results differ"), KeyboardInterrupt()], ids=repr)
def test_a_picture_has_what_was_measured_before_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: BaseException
) -> None:
    def ends(*_: object) -> Iterator[report.AnyRow]:
        yield BLOCKS
        raise reason

    monkeypatch.setattr(parts, "blocks", ends)
    picture = tmp_path / "blocks.svg"
    done = CliRunner().invoke(command.main, [*SMALL, "--only", "blocks", "--svg", str(picture)])
    assert done.exit_code == 1
    texts = [element.text for element in ElementTree.fromstring(picture.read_text()).iter()]
    assert BLOCKS.name.removeprefix("blocks ") in texts


@pytest.mark.usefixtures("threads")
def test_where_nothing_can_be_drawn_it_says_so_and_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "blocks", lambda *_: iter([report.Skip("blocks", "no room")]))
    for before in None, "an older picture":
        picture = tmp_path / "blocks.svg"
        if before is not None:
            picture.write_text(before)
        done = CliRunner().invoke(command.main, [*SMALL, "--only", "blocks", "--svg", str(picture)], catch_exceptions=False)
        assert done.exit_code == 0
        assert f"{picture} was not written: no curve over block sizes was measured" in done.output
        assert (picture.read_text() if picture.exists() else None) == before


def test_a_picture_in_a_folder_that_takes_none_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(click.BadParameter, match="can't be written: Not a directory"):
        check_writable(tmp_path / "file" / "picture.svg", "--svg")
    check_writable(tmp_path / "new", "--svg")
    assert not (tmp_path / "new").exists()
    with pytest.raises(click.ClickException, match="can't be written: Is a directory"):
        write(tmp_path, "text")


def test_what_stands_in_columns_stays_in_them_in_the_help() -> None:
    done = CliRunner().invoke(command.main, ["--help"], terminal_width=80)
    assert done.exit_code == 0
    lines = [line.strip() for line in done.output.splitlines()]
    arranged = [line.strip() for line in (command.__doc__ or "").splitlines() if line.startswith((*cases.PARTS, "    python"))]
    assert len(arranged) == len(cases.PARTS) + 1
    assert set(arranged) <= set(lines)
    assert help_of("One\nline.\n\n1. This\n   that\n") == "One\nline.\n\n\b\n1. This\n   that"


@pytest.mark.processes
@pytest.mark.usefixtures("threads")
def test_an_interpreter_without_vllm_is_told_in_one_line() -> None:
    words = [*SMALL, "--only", "decode", "--match", "1 x 128 (9", "--vllm-python", sys.executable]
    done = CliRunner().invoke(command.main, words)
    assert done.exit_code == 1
    assert "ended with status 1" in done.output
