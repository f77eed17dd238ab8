"""`kilburn simulate`: one object for programs, tables for people, one line for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks import simulation
from benchmarks.figure import PARTS, Bar, stacked_bars
from cli.main import main
from cli.simulate import BEAM_WIDTHS
from cli.simulated import bar
from memmgr.simulate.beams import recorded

NAMES = {
    *("policy", "requests", "steps", "utilization", "reserved", "internal_fragmentation", "external_fragmentation", "free"),
    *("mean_running", "block_hit_rate", "evictions", "preemptions", "max_waste_tokens"),
}
POLICIES = ["paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{5 + i % 7 * 9},{1 + i % 11 * 6}\n" for i in range(60)))
    return str(path)


@pytest.fixture
def prefixes(tmp_path: Path) -> str:
    path = tmp_path / "prefixes.jsonl"
    rows = [{"timestamp": 0, "input_length": 1300, "output_length": 4, "hash_ids": [0, i % 2, 9 + i]} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(["simulate", *words]) == status
    out, err = capsys.readouterr()
    return out, err


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    out, err = said(capsys, *words, "--json")
    assert err == ""
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("policy", POLICIES)
def test_one_object_with_the_promised_names(capsys: pytest.CaptureFixture[str], pairs: str, policy: str) -> None:
    report = asked(capsys, pairs, "--policy", policy, "--num-blocks", "40", "--block-size", "8")
    assert set(report) == NAMES
    assert (report["policy"], report["requests"]) == (policy, 60)
    shares = ("utilization", "reserved", "internal_fragmentation", "external_fragmentation", "free")
    assert sum(report[share] for share in shares) == pytest.approx(1)


def test_all_policies_in_one_go(capsys: pytest.CaptureFixture[str], pairs: str) -> None:
    words = (pairs, "--num-blocks", "40", "--block-size", "8")
    reports = asked(capsys, *words, "--policy", "all")["policies"]
    assert [report["policy"] for report in reports] == POLICIES
    assert reports[0] == asked(capsys, *words)
    out, _ = said(capsys, *words, "--policy", "all")
    for name in (*POLICIES, "tokens", "reserved", "internal frag.", "external frag.", "free", "as many requests at once"):
        assert name in out


def test_a_policy_under_which_nothing_fits_is_left_out_of_all(capsys: pytest.CaptureFixture[str], pairs: str) -> None:
    out, err = said(capsys, pairs, "--policy", "all", "--num-blocks", "12", "--block-size", "8", "--max-model-len", "90")
    assert err.splitlines()[0].startswith("contiguous-max: none of 60 requests fits")
    assert "contiguous-oracle" in out
    assert "contiguous-max" not in out
    out, err = said(capsys, pairs, "--policy", "all", "--num-blocks", "1", "--block-size", "2", status=2)
    assert err.endswith("kilburn: no request fits under any policy\n")


def test_the_context_is_the_longest_request_unless_said(capsys: pytest.CaptureFixture[str], pairs: str) -> None:
    out, _ = said(capsys, pairs)
    assert "981 blocks of 16, context 114" in out
    assert "no request ever waited" in out[: out.index("policy")]
    out, err = said(capsys, pairs, "--max-model-len", "50")
    assert re.match(r"\d+ of 60 requests of pairs.csv, 981 blocks of 16, context 50\n", out)
    assert err.count("\n") == 1
    assert "left out" in err


def test_a_limit_and_an_order(capsys: pytest.CaptureFixture[str], pairs: str) -> None:
    words = (pairs, "--num-blocks", "20", "--limit", "20")
    first = asked(capsys, *words)
    assert first["requests"] == 20
    shuffled = asked(capsys, *words, "--seed", "1")
    assert shuffled["requests"] == 20
    assert shuffled != first
    assert asked(capsys, *words, "--seed", "1") == shuffled, "the same seed, the same run"


def test_the_beams_to_choose_from_are_those_that_were_recorded() -> None:
    assert tuple(sorted(recorded())) == BEAM_WIDTHS


@pytest.mark.parametrize("flag", ["--samples", "--beams"])
def test_sequences_of_one_prompt_save_blocks(capsys: pytest.CaptureFixture[str], pairs: str, flag: str) -> None:
    words = (pairs, "--num-blocks", "60", "--block-size", "8")
    report = asked(capsys, *words, flag, "4")
    assert set(report) == {*NAMES, "shared_saving"}
    assert 0 < report["shared_saving"] < 3 / 4
    assert 0 < report["max_waste_tokens"] < 8
    assert report["requests"] == 60
    assert asked(capsys, *words, flag, "1") == asked(capsys, *words)
    out, _ = said(capsys, *words, flag, "4")
    assert f"sharing saves {report['shared_saving']:.1%} of the blocks" in out


def test_prefixes_are_found_one_by_one(capsys: pytest.CaptureFixture[str], prefixes: str) -> None:
    report = asked(capsys, prefixes, "--prefix-cache", "--num-blocks", "50")
    assert report["block_hit_rate"] == pytest.approx((0 + 1 + 6 * 2) / 24)
    assert (report["steps"], report["requests"], report["evictions"]) == (8, 8, 0)
    out, _ = said(capsys, prefixes, "--prefix-cache", "--num-blocks", "3")
    assert "blocks were found" in out
    assert "no order of eviction could have found more than" in out
    saturated = asked(capsys, prefixes, "--prefix-cache", "--saturated", "--block-size", "16", "--max-running", "2")
    assert saturated["requests"] == 8
    assert saturated["block_hit_rate"] > 0.3
    assert asked(capsys, prefixes)["block_hit_rate"] == 0, "off unless asked for"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--policy", "segmented"], "--policy"),
        (["--num-blocks", "0"], "--num-blocks"),
        (["--num-blocks", "100000000"], "--num-blocks"),
        (["--block-size", "0"], "--block-size"),
        (["--block-size", "1025"], "--block-size"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--max-running", "9", "--max-step-tokens", "8"], "--max-step-tokens 8"),
        (["--limit", "0"], "--limit"),
        (["--prefix-cache", "--policy", "all"], "nothing is shared"),
        (["--prefix-cache", "--policy", "contiguous-max"], "nothing is shared"),
        (["--samples", "2", "--policy", "contiguous-max"], "nothing is shared"),
        (["--beams", "2", "--policy", "all"], "nothing is shared"),
        (["--samples", "65"], "--samples"),
        (["--samples", "9", "--max-running", "8"], "--samples 9"),
        (["--samples", "2", "--beams", "2"], "not both"),
        (["--beams", "5"], "'5' is not one of '1', '2', '4', '6'"),
        (["--seed", "x"], "'x' is no whole number"),
        (["--samples", "2", "--prefix-cache", "--one-by-one"], "--samples"),
        (["--one-by-one"], "--prefix-cache"),
        (["--one-by-one", "--prefix-cache"], "no prefixes"),
        (["--num-blocks", "1", "--block-size", "2"], "none of 60 requests fits"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], pairs: str, words: list[str], part: str) -> None:
    out, err = said(capsys, pairs, *words, status=2)
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kilburn: ")
    assert part in err


def test_a_bad_trace_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, pairs: str) -> None:
    with Path(pairs).open("a") as file:
        file.write("five,6\n")
    _, err = said(capsys, pairs, status=2)
    assert err == f"kilburn: {pairs}:62: prompt_tokens is 'five', not a whole number\n"
    for path in (tmp_path / "none", tmp_path):
        _, err = said(capsys, str(path), status=2)
        assert str(path) in err
        assert err.count("\n") == 1


def test_a_bar_has_its_length_whatever_the_shares() -> None:
    parts = [(0.333, "a", "red"), (0.333, "b", "blue"), (0.0, "c", "red"), (0.334, "d", "red")]
    assert bar(parts, 10).plain == "aaabbbbddd"
    assert len(bar([(1 / 7, "x", "red")] * 7, 50).plain) == 50


def test_the_benchmark_prints_its_tables_and_a_picture(tmp_path: Path, pairs: str, prefixes: str) -> None:
    for name, path in (
        ("sharegpt_lengths.csv.gz", pairs),
        ("mooncake_conversation.jsonl.gz", prefixes),
        ("mooncake_synthetic.jsonl.gz", prefixes),
    ):
        (tmp_path / name).write_bytes(Path(path).read_bytes())
    picture = tmp_path / "picture.svg"
    done = CliRunner().invoke(simulation.main, ["--data", str(tmp_path), "--svg", str(picture), "--limit", "50"])
    assert done.exit_code == 0, done.output
    for words in (
        *("contiguous-pow2", "paged runs", "no sequence ever held", "table entries"),
        *("Alpaca-like", "beams", "never forgetting", "mooncake_synthetic"),
    ):
        assert words in done.output
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert all(name in drawn for name in (*POLICIES, "external fragmentation"))
    answer = json.loads(CliRunner().invoke(simulation.main, ["--data", str(tmp_path), "--json", "--limit", "5"]).output)
    assert [size["block_size"] for size in answer["block_sizes"]] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert len(answer["policies"]) == 4
    assert len(answer["hit_rates"]) == len(answer["segments"]) == 8
    assert list(answer["segments"][0]["orders"])[-1] == "30 %, 4", "the default comes last"
    assert [(one["trace"], one["method"]) for one in answer["sharing"]] == [
        ("Alpaca-like", "samples"),
        ("ShareGPT", "samples"),
        ("Alpaca-like", "beams"),
        ("ShareGPT", "beams"),
    ]
    assert all(0 <= saved < 1 for one in answer["sharing"] for saved in one["saved"].values())


def test_a_part_of_the_benchmark_needs_only_its_trace(tmp_path: Path, pairs: str) -> None:
    (tmp_path / "sharegpt_lengths.csv.gz").write_bytes(Path(pairs).read_bytes())
    run = CliRunner()
    words = ["--data", str(tmp_path), "--limit", "20", "--json"]
    done = run.invoke(simulation.main, [*words, "--only", "block-sizes"])
    assert set(json.loads(done.output)) == {"block_sizes"}
    assert done.output == run.invoke(simulation.main, [*words, "--only", "block-sizes"]).output, "the same, every time"
    done = run.invoke(simulation.main, [*words, "--only", "block-sizes", "--svg", str(tmp_path / "picture.svg")])
    assert done.exit_code == 2
    assert "--only policies" in done.output
    assert run.invoke(simulation.main, [*words, "--svg", str(tmp_path / "none" / "picture.svg")]).exit_code == 2
    assert run.invoke(simulation.main, words).exit_code == 1, "the other traces are not there"


def shares_drawn(svg: str) -> list[list[float]]:
    """Return the heights of the parts of each bar, as shares, from the bottom."""
    root = ElementTree.fromstring(svg)
    bars: dict[str, list[float]] = {}
    colours = {colour for _, colour, _ in PARTS}
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if box.get("fill") in colours and float(box.get("width", "0")) > 20:
            bars.setdefault(box.get("x", ""), []).append(float(box.get("height", "0")))
    return [[height / sum(heights) for height in heights] for heights in bars.values()]


def test_the_picture_shows_the_shares() -> None:
    shares = [(0.5, 0.25, 0.125, 0.125, 0.0), (0.1, 0.2, 0.3, 0.025, 0.375)]
    bars = [Bar(f"<{number}> & more", "note", one) for number, one in enumerate(shares)]
    svg = stacked_bars(bars, "title", "axis")
    assert svg == stacked_bars(bars, "title", "axis")
    assert shares_drawn(svg) == [pytest.approx(one, abs=2e-4) for one in shares]
    texts = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"title", "axis", "<0> & more", "note", "50.0%", "37.5%"} <= set(texts)
    assert "2.5%" not in texts, "too small to write into"
