"""`kilburn simulate`: one object for programs, tables for people, one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import simulation
from cli.main import main
from cli.simulated import bar

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
    assert "no request ever waited" in out
    out, err = said(capsys, pairs, "--max-model-len", "50")
    assert "context 50" in out
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
    for words in ("contiguous-pow2", "table entries", "never forgetting", "mooncake_synthetic"):
        assert words in done.output
    assert picture.read_text().startswith("<svg")
    answer = json.loads(CliRunner().invoke(simulation.main, ["--data", str(tmp_path), "--json", "--limit", "5"]).output)
    assert [size["block_size"] for size in answer["block_sizes"]] == [1, 4, 8, 16, 32, 64, 128, 256]
    assert len(answer["policies"]) == 4
    assert len(answer["hit_rates"]) == 8
