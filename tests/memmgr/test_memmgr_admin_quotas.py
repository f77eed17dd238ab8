"""Quotas through the real admin API, with a real engine and peers over sockets."""

from __future__ import annotations

from functools import partial

import grpc
import pytest
from click.testing import CliRunner

from cli.commands import kilburn
from kilburn.config import Address
from kilburn.limits import MAX_QUOTAS
from kilburn.v1 import admin_pb2 as admin
from kilburn.v1 import engine_pb2 as engine
from tests.memmgr.conftest import House
from tests.memmgr.memmgr_messages import submit
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS, Background, Executor
from tests.memmgr.test_memmgr_admin import address, scheduler_of, stub, until
from tests.memmgr.test_memmgr_admin_prefixes import SHORT, Stub, ask_probe, pin, refused, serve, working

__all__ = ["address", "stub", "working"]  # fixtures


def set_quota(stub: Stub, tenant: str, **fields: int) -> admin.Quota:
    return stub.SetQuota(admin.Quota(tenant=tenant, **fields), timeout=PATIENCE_SECONDS)


def quotas(stub: Stub) -> list[admin.Quota]:
    return list(stub.ListQuotas(admin.ListQuotasRequest(), timeout=PATIENCE_SECONDS))


def test_without_an_executor(stub: Stub) -> None:
    assert quotas(stub) == []
    assert refused(partial(set_quota, stub, "a", max_blocks=1))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.usefixtures("working")
def test_quotas_are_set_listed_and_taken_away(stub: Stub) -> None:
    assert set_quota(stub, "b", max_blocks=5, guaranteed_blocks=3, max_running=2) == admin.Quota(
        tenant="b", max_blocks=5, guaranteed_blocks=3, max_running=2
    )
    set_quota(stub, "a", max_blocks=7)
    assert [(quota.tenant, quota.max_blocks) for quota in quotas(stub)] == [("a", 7), ("b", 5)]
    set_quota(stub, "b", max_blocks=4)
    assert [(quota.tenant, quota.max_blocks, quota.guaranteed_blocks) for quota in quotas(stub)] == [("a", 7, 0), ("b", 4, 0)]
    set_quota(stub, "a")
    set_quota(stub, "nobody")
    assert [quota.tenant for quota in quotas(stub)] == ["b"]


@pytest.mark.usefixtures("working")
def test_what_no_quota_can_say(stub: Stub) -> None:
    for tenant, fields, word in [
        ("", {"max_blocks": 1}, "tenant is empty"),
        ("a" * 129, {"max_blocks": 1}, "129 characters"),
        ("a", {"max_blocks": 1, "guaranteed_blocks": 2}, "guaranteed_blocks is 2; no more"),
    ]:
        code, message = refused(partial(set_quota, stub, tenant, **fields))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert word in message
    assert quotas(stub) == []


@pytest.mark.usefixtures("working")
def test_there_is_a_most_number_of_quotas(stub: Stub, house: House) -> None:
    for number in range(MAX_QUOTAS):
        set_quota(stub, f"{number}", max_blocks=1)
    code, message = refused(partial(set_quota, stub, "one more", max_blocks=1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{MAX_QUOTAS} tenants" in message
    set_quota(stub, "7", max_blocks=2)  # one that has one
    set_quota(stub, "8")
    set_quota(stub, "one more", max_blocks=1)
    assert len(house.engine.quotas) == MAX_QUOTAS


@pytest.mark.usefixtures("working")
def test_what_is_guaranteed_and_pinned_leaves_one_longest_request_its_room(stub: Stub, house: House) -> None:
    """Of 16 blocks the longest request needs 8."""
    set_quota(stub, "a", guaranteed_blocks=6)
    code, message = refused(partial(set_quota, stub, "b", guaranteed_blocks=3))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert message == (
        "6 blocks are guaranteed to other tenants and 0 are pinned; with 3 more they are too many: at most 8 of 16 may be, "
        "so that one request of 32 tokens can run"
    )
    serve(house, list(range(13)))
    code, message = refused(partial(pin, stub, range(12)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "6 guaranteed to tenants" in message
    assert pin(stub, range(8)).blocks == 2
    assert refused(partial(set_quota, stub, "a", guaranteed_blocks=7))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert set_quota(stub, "a", guaranteed_blocks=6, max_blocks=9).max_blocks == 9  # no more is guaranteed than before


def test_a_tenant_at_its_limit_waits_and_no_other_does(stub: Stub, house: House) -> None:
    executor = house.executor(**SHORT)
    executor.pause_seconds = 0.02
    background = Background(executor)
    set_quota(stub, "noisy", max_blocks=6, max_running=1)
    gateway = house.gateway()
    for handle in (1, 2, 3):
        gateway.send(submit(handle, prompt_ids=[handle] * 5, max_tokens=15, tenant="noisy"))
    gateway.send(submit(4, prompt_ids=[4] * 5, max_tokens=15, tenant="quiet"))
    gateway.send(submit(5, prompt_ids=[5] * 24, max_tokens=2, tenant="noisy"))  # 7 blocks
    refusal = gateway.wait_end(5)
    assert refusal.error == engine.ERROR_CODE_NEVER_FITS
    assert refusal.message == "the prompt has 24 tokens; with one of output they do not fit the 6 blocks that its tenant may have"
    until(
        lambda: house.ask(
            lambda: (
                [(one.submission.tenant, one.submission.key[1]) for one in scheduler_of(house).running]
                == [("noisy", 1), ("quiet", 4)]
            )
        )
    )
    assert 2 <= quotas(stub)[0].used_blocks <= 5
    asked = ask_probe(stub, [9] * 5, tenant="noisy")
    assert (asked.fits_now, asked.fits_ever) == (False, True)
    assert ask_probe(stub, [9] * 5, tenant="quiet").fits_now
    assert not ask_probe(stub, [9] * 24, tenant="noisy").fits_ever
    for handle in (1, 2, 3, 4):
        assert gateway.wait_end(handle).error == engine.ERROR_CODE_OK
    until(lambda: quotas(stub)[0].used_blocks == 0)
    background.stop()


def test_quotas_outlive_the_executor(stub: Stub, house: House) -> None:
    background = Background(house.executor(**SHORT))
    set_quota(stub, "a", max_blocks=2, max_running=1)
    set_quota(stub, "b", guaranteed_blocks=5)
    set_quota(stub, "c", guaranteed_blocks=3)
    before = quotas(stub)
    background.stop()
    background = Background(house.executor(**SHORT))
    assert quotas(stub) == before
    in_force = house.ask(lambda: {quota.tenant: quota.guaranteed_blocks for quota in scheduler_of(house).memory.quotas})
    assert in_force == {"a": 0, "b": 5, "c": 3}
    background.stop()
    background = Background(house.executor(total_blocks=14, **SHORT))  # 6 may be guaranteed there
    assert quotas(stub) == before
    in_force = house.ask(lambda: {quota.tenant: quota.guaranteed_blocks for quota in scheduler_of(house).memory.quotas})
    assert in_force == {"a": 0, "b": 5, "c": 1}
    background.stop()


@pytest.fixture
def server(address: Address, working: Executor) -> list[str]:
    assert working.slots == {}
    return ["--admin-server", str(address)]


def test_the_command(server: list[str]) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(kilburn, ["quotas", *words, *server])
        assert done.exit_code == 0, done.output
        return done.output

    assert "acme" in run("set", "acme", "--max-blocks", "9", "--guaranteed-blocks", "2")
    assert '"max_blocks": 9, "guaranteed_blocks": 2, "used_blocks": 0, "max_running": 0' in run("--json")
    assert '"max_running": 4' in run("set", "acme", "--max-running", "4", "--json")
    assert [line.split() for line in run().splitlines()][-1] == ["acme", "│", "0", "│", "0", "│", "no", "limit", "│", "4"]
    run("set", "acme", "--max-running", "0")
    assert run("--json") == "[]\n"


def test_verify_says_whether_the_executor_was_compared(server: list[str]) -> None:
    for words, said in (
        ([], "the executor's view compared"),
        (["--without-executor"], "the executor not asked"),
    ):
        done = CliRunner().invoke(kilburn, ["verify", *words, *server])
        assert done.exit_code == 0
        assert said in done.output
