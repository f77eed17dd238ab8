"""`kilburn up`, with real processes and a tiny model: what it starts, keeps and ends."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.services import ROLES
from kilburn.client import AdminClient, Client
from kilburn.config import parse_address
from kilburn.v1.inference_pb2 import GenerateRequest, Stopping
from kilburn.wire import endpoints
from tests.cli.cli_help import ROOT, STOP_SECONDS, Up, environment, kilburn, up, wait_until

pytestmark = pytest.mark.processes


def answer(running: Up) -> int:
    """Ask for eight tokens; return how many came."""
    request = GenerateRequest(text="virtual memory", stopping=Stopping(max_tokens=8, ignore_eos=True))
    with Client(running.gateway) as client:
        return sum(len(response.token_ids) for response in client.generate(request, timeout=60))


def connects(address: str) -> bool:
    place = parse_address(address)
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((place.host, place.port)) == 0


def left_behind(runtime_dir: Path) -> list[str]:
    pools = [str(path) for path in Path("/dev/shm").glob(f"*{endpoints.instance_id(runtime_dir)}*")]
    return pools + ([str(runtime_dir)] if runtime_dir.exists() else [])


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_serves_restarts_what_dies_and_leaves_nothing(runtime_dir: Path, tiny_model: Path) -> None:
    with up(runtime_dir, "--model", str(tiny_model), "--num-blocks", "64") as running:
        ask_everything(running, runtime_dir)
        old = [running.role(role) for role in ROLES]
        for process in old:
            process.kill()
        wait_until(lambda: gone(old), 5, "their end")
        wait_until(lambda: kilburn("health", "gateway", "--listen", running.gateway).returncode == 0, 90, "new ones")
        assert answer(running) == 8
        with AdminClient(running.admin) as admin:
            wait_until(lambda: admin.pool().live_blocks == 0, 10, "an idle pool")
        processes = running.tree()
        assert len(processes) >= 4
        assert running.stop() == 0
        assert gone(processes)
    assert not left_behind(runtime_dir)
    assert not connects(running.gateway)
    assert not connects(running.admin)


def spoken(running: Up, *words: str) -> Any:
    """Run a client command of an instance with --json; return what it says."""
    where = ("--server", running.gateway) if words[0] == "generate" else ("--admin-server", running.admin)
    done = kilburn(*words, *where, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def ask_everything(running: Up, runtime_dir: Path) -> None:
    """Use each client command once."""
    stopping = ("--max-tokens", "24", "--ignore-eos", "--temperature", "0")
    answer = spoken(running, "generate", "virtual memory", *stopping, "--request-id", "mine")
    assert (answer["request_id"], answer["finish_reason"]) == ("mine", "FINISH_REASON_LENGTH")
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 24
    shown = kilburn("generate", "virtual memory", *stopping, "--server", running.gateway)
    assert shown.stdout == answer["text"] + "\n"
    assert "score" in answer
    beams = ("generate", "virtual memory", "--max-tokens", "8", "--ignore-eos", "--beams", "3", "--n", "2")
    best, second = spoken(running, *beams)["answers"]
    assert best["score"] > second["score"]
    assert best["token_ids"] != second["token_ids"]
    assert kilburn(*beams, "--server", running.gateway).stdout.startswith(f"1 (score {best['score']:.4f}): ")
    pool = spoken(running, "pool")
    assert pool["total_blocks"] == 64
    assert pool["free_blocks"] + pool["live_blocks"] + pool["cached_blocks"] == 64
    assert len(spoken(running, "blocks")) == 64
    assert len(spoken(running, "blocks", "--state", "cached")) == pool["cached_blocks"] > 0
    assert spoken(running, "sequences", "--table") == []
    verdict = spoken(running, "verify")
    assert verdict["ok"] is True
    assert verdict["checks"] > 0
    assert "64 of 16 tokens" in kilburn("pool", "--admin-server", running.admin).stdout
    for words in (("cancel", "nobody"), ("sequences", "--request-id", "nobody")):
        refused = kilburn(*words, "--admin-server", running.admin)
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
    for role, *where in (("gateway", "--listen", running.gateway), ("memmgr", "--admin", running.admin), ("executor",)):
        assert kilburn("health", role, *where, "--runtime-dir", str(runtime_dir)).returncode == 0


def test_nothing_outlives_a_killed_up_or_a_killed_supervisor(runtime_dir: Path, tiny_model: Path) -> None:
    with up(runtime_dir, "--model", str(tiny_model), "--num-blocks", "64") as running:
        processes = running.tree()
        running.process.kill()
        wait_until(lambda: gone(processes), STOP_SECONDS, "the end of all that it started")
    with up(runtime_dir, "--model", str(tiny_model), "--num-blocks", "64") as running:
        assert answer(running) == 8
        processes = running.tree()
        running.role("daemon").kill()
        assert running.process.wait(STOP_SECONDS) == 2
        assert gone(processes)
    assert running.log[-1] == "kilburn: supervisord has ended; the log above says why\n"
    assert not left_behind(runtime_dir)


def test_starts_after_everything_was_killed_at_once_find_nothing_in_their_way(runtime_dir: Path, tiny_model: Path) -> None:
    """Each crash leaves a pool file, sockets and locks, which the next start takes over: they do not grow in number."""
    leftovers = []
    for _ in range(2):
        with up(runtime_dir, "--model", str(tiny_model), "--num-blocks", "64") as running:
            assert answer(running) == 8
            processes = [*running.tree(), psutil.Process(running.process.pid)]
            for process in processes:
                process.suspend()  # or one of them would end in order while the others die
            for process in processes:
                process.kill()
            wait_until(lambda processes=processes: gone(processes), 5, "their end")  # type: ignore[misc]
            leftovers.append(sorted([*left_behind(runtime_dir), *(str(path) for path in runtime_dir.rglob("*"))]))
    assert leftovers[0] == leftovers[1] != []
    with up(runtime_dir, "--model", str(tiny_model), "--num-blocks", "64") as running:
        assert answer(running) == 8
        assert running.stop() == 0
    assert not left_behind(runtime_dir)


def test_a_second_up_in_the_same_folder_is_refused(runtime_dir: Path, tiny_model: Path) -> None:
    with endpoints.lock(runtime_dir, "up"):
        done = kilburn("up", "--runtime-dir", str(runtime_dir), "--model", str(tiny_model))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "already uses" in done.stderr


@pytest.mark.parametrize("flag", ["--listen", "--admin"])
def test_a_port_in_use_is_one_line(runtime_dir: Path, tiny_model: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = kilburn("up", "--runtime-dir", str(runtime_dir), "--model", str(tiny_model), flag, address)
    assert done.returncode == 2
    assert done.stderr == f"kilburn: {flag} {address}: the port is in use; name another, or port 0 for a free one\n"
    assert not left_behind(runtime_dir)


def test_a_damaged_model_ends_up_with_one_line_and_no_retries(runtime_dir: Path, tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    flags = ("--runtime-dir", str(runtime_dir), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--device", "cpu")
    done = kilburn("up", *flags, "--model", str(tmp_path), timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("kilburn: executor: "), done.stderr
    assert done.stdout == ""
    assert not left_behind(runtime_dir)


def test_a_signal_while_starting_ends_all(runtime_dir: Path, tiny_model: Path) -> None:
    flags = ("--runtime-dir", str(runtime_dir), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "up", *flags, "--model", str(tiny_model)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 4, 60, "its processes")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=STOP_SECONDS)
    assert process.returncode == 0
    assert output == b""
    assert gone(started)
    assert not left_behind(runtime_dir)
