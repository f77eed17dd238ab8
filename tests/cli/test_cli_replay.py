"""`kilburn memmgr --journal` and `kilburn replay`: a real memory manager under load, killed, started again, and replayed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import main
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.endpoints import executor_endpoint, gateway_endpoint
from tests.memmgr.conftest import context
from tests.memmgr.memmgr_journal import framed, parsed, replayed, write_small
from tests.memmgr.memmgr_messages import hello, submit
from tests.memmgr.memmgr_peers import Background, Context, Executor, Gateway

assert context, "the fixture"

START_SECONDS = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kilburn-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(runtime_dir: Path, journal: Path) -> subprocess.Popen[str]:
    words = ("memmgr", "--runtime-dir", str(runtime_dir), "--admin", "127.0.0.1:0", "--journal", str(journal))
    return subprocess.Popen([sys.executable, "-m", "cli", *words], stderr=subprocess.PIPE, text=True)


def generate(gateway: Gateway, first: int, count: int) -> None:
    """Ask for much at once, of which some begins alike; more than the pool holds."""
    for handle in range(first, first + count):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: 1 + handle % 9] + [handle % 50] * (handle % 5)
        gateway.send(submit(handle, prompt_ids=prompt, max_tokens=3 + handle % 17))


@pytest.mark.processes
def test_a_process_that_was_killed_can_be_replayed_and_the_next_one_goes_on(
    path: Path, runtime_dir: Path, context: Context, started: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    started.append(start(runtime_dir, path))
    executor = Executor(context, executor_endpoint(runtime_dir), hello())
    gateway = Gateway(context, gateway_endpoint(runtime_dir))
    working = Background(executor)
    gateway.until(lambda: gateway.serving, "an executor")
    generate(gateway, 1, 40)
    gateway.until(lambda: len(gateway.ends) >= 20, "half of the answers")
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].wait()
    assert path.stat().st_mode & 0o777 == 0o600

    replaying, summary = replayed(path)
    assert (summary.runs, summary.pools, summary.killed, summary.ended) == (1, 1, 0, False)
    assert summary.steps > 20
    assert summary.sequences > 30
    assert summary.preemptions > 0
    assert replaying.memory is not None

    gateway.states.clear()
    gateway.ends.clear()
    gateway.tokens.clear()
    started.append(start(runtime_dir, path))
    gateway.until(lambda: gateway.serving and not gateway.ends, "the second one")
    generate(gateway, 101, 10)
    for handle in range(101, 111):
        assert gateway.wait_end(handle).error == engine.ERROR_CODE_OK
    # A second one with this journal, in another folder, is refused.
    other = runtime_dir / "other"
    started.append(start(other, path))
    assert started[2].wait(START_SECONDS) == 2
    assert started[2].stderr is not None
    lines = started[2].stderr.read().splitlines()
    assert lines[-1:] == [f"kilburn: --journal {path}: another process is writing this journal; name another file"]
    started[1].terminate()
    assert started[1].wait(START_SECONDS) == 0
    working.stop()
    executor.close()
    gateway.close()

    assert main(["replay", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: told[name] for name in ("runs", "pools", "killed", "ended", "torn_bytes", "blocks")} == {
        "runs": 2,
        "pools": 2,
        "killed": 1,
        "ended": True,
        "torn_bytes": 0,
        "blocks": 16,
    }
    assert told["operations"] > summary.operations
    assert told["bytes"] == path.stat().st_size


def test_the_table_says_what_was_seen(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(path)
    assert main(["replay", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(rf"^operations +{replayed(path)[1].operations}\n", out, re.MULTILINE)
    assert re.search(r"^runs, pools +1, 1\n", out, re.MULTILINE)
    assert "every operation came to what was recorded; all invariants hold, checked after each operation\n" in out
    assert "killed" not in out
    assert main(["replay", str(path), "--check-every", "1000"]) == 0
    assert "checked after each 1,000 operations\n" in capsys.readouterr().out


def test_a_journal_that_was_cut_off_is_well_and_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_small(path)
    path.write_bytes(whole[:-3])
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^journal ends in the middle of the record behind operation \d+: the process was killed, or is", out, re.MULTILINE
    )


def test_what_is_wrong_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(status: int, *words: str) -> str:
        assert main(["replay", *words]) == status
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err.removeprefix("kilburn: ").rstrip()

    whole = write_small(path)
    assert complaint(1, str(path), "--max-blocks", "7").startswith(f"{path}: before the first operation: a pool of 8 blocks;")
    wrong = parsed(path)
    next(entry for entry in wrong if entry.HasField("end_step")).outcome ^= 1
    framed(wrong, path)
    assert complaint(1, str(path)).startswith(f"{path}: operation 3 (end_step, after 1 steps): came to ")
    path.write_bytes(whole[:100] + b"\0" + whole[101:])
    assert re.fullmatch(rf"{path}: damaged between byte \d+ and \d+, behind operation \d+", complaint(1, str(path)))
    path.write_bytes(b"")
    assert complaint(1, str(path)) == f"{path}: no journal: the file is empty"
    path.write_text("a shopping list")
    assert complaint(1, str(path)) == f"{path}: no journal"
    assert complaint(2, str(path.parent / "none")).endswith("does not exist.")
    assert complaint(2, "/dev/null") == "/dev/null: this is no plain file"
    path.chmod(0)
    if not os.access(path, os.R_OK):
        assert complaint(2, str(path)).endswith("is not readable.")
