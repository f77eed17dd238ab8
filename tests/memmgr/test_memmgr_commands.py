"""The commands about prefixes and events against a running admin API."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cli.main import main
from kilburn.config import Address
from kilburn.v1 import admin_pb2_grpc
from tests.memmgr.conftest import House
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS, Executor
from tests.memmgr.test_memmgr_admin import address, get_pool, stub
from tests.memmgr.test_memmgr_admin_prefixes import serve, working

__all__ = ["address", "stub", "working"]  # fixtures


def test_what_the_commands_say(
    stub: admin_pb2_grpc.AdminStub, address: Address, house: House, working: Executor, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(house, list(range(9)))
    capsys.readouterr()
    where = ("--admin-server", str(address))
    ids = ("--ids", ",".join(map(str, range(9))))

    def said(*words: str) -> str:
        assert main((*words, *where)) in {None, 0}
        return capsys.readouterr().out

    assert [node["depth"] for node in json.loads(said("prefixes", "--json"))] == [0, 1, 2]
    assert len(said("prefixes", "--with-tokens").splitlines()) == 5
    assert json.loads(said("probe", *ids, "--json"))["cached_tokens"] == 8
    assert "fits now" in said("probe", *ids)
    made = json.loads(said("pins", *ids, "--json"))
    assert made["blocks"] == 2
    assert made["pin_id"] in said("pins")
    assert json.loads(said("pins", "--unpin", made["pin_id"], "--json")) == []
    assert "unpinned" in said("explain", "0")
    assert len(json.loads(said("explain", "0", "--json"))["events"]) == 5


@pytest.mark.usefixtures("stub")
def test_what_is_said_while_there_is_no_executor(address: Address, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--admin-server", str(address))
    with pytest.raises(SystemExit, match="1"):
        main(["verify", *where])
    assert capsys.readouterr().out == "no executor is connected\n0 checks, 1 fault; nothing was there to be checked or compared\n"
    assert main(["verify", "--without-executor", *where]) == 0
    assert capsys.readouterr().out == "0 checks, 0 faults; nothing was there to be checked or compared\n"
    assert main(["pool", *where]) == 0
    assert capsys.readouterr().out.startswith("no executor is connected, so there is no pool\n\ncounter")


def test_events_are_followed_until_the_reader_has_enough(
    stub: admin_pb2_grpc.AdminStub, address: Address, house: House, working: Executor
) -> None:
    serve(house, list(range(9)))
    last = get_pool(stub).cursor
    words = ["events", "--from-oldest", "--json", "--admin-server", str(address)]
    with subprocess.Popen([sys.executable, "-m", "cli", *words], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        told = [json.loads(follower.stdout.readline()) for _ in range(last)]
        assert follower.poll() is None
        follower.terminate()
        follower.wait(PATIENCE_SECONDS)
    assert [event["cursor"] for event in told] == list(range(1, last + 1))
