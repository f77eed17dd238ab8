"""A process that dies or freezes: what its clients see, how soon, and that the next request works."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from kilburn.client import Client
from kilburn.v1.admin_pb2 import VerifyRequest
from kilburn.v1.admin_pb2_grpc import AdminStub
from tests.e2e.calls import Answer, Running, ask, ask_all, greedy
from tests.e2e.place import ROLES, Role, wait_until
from tests.e2e.system import System

pytestmark = pytest.mark.processes

#: From the loss of a process to UNAVAILABLE at the client.
NOTICED_SECONDS = 5.0

#: More tokens than there is time for.
ENDLESS = 16_000

STREAMS = 3


@pytest.fixture
def expected(tiny_system: System) -> list[int]:
    """Return the answer that must come before and after everything that happens."""
    return good(tiny_system).ids


def good(system: System) -> Answer:
    """Ask something short that must succeed."""
    answer = ask(system.client, greedy([3, 1, 4, 1, 5], 6))
    assert answer.code is grpc.StatusCode.OK, answer.details
    return answer


def start_streams(client: Client) -> list[Running]:
    """Start requests that would go on for long, and wait until each has tokens."""
    streams = [Running(client, greedy([number + 1] * 30, ENDLESS)) for number in range(STREAMS)]
    wait_until(lambda: all(stream.tokens >= 2 for stream in streams), 60, "tokens of each stream")
    return streams


def assert_ended(streams: list[Running], since: float) -> None:
    """Insist that all streams end with UNAVAILABLE in time."""
    for stream in streams:
        answer = stream.wait(NOTICED_SECONDS + 30)
        assert answer.code is grpc.StatusCode.UNAVAILABLE, answer.details
        assert answer.ended - since <= NOTICED_SECONDS
        assert len(answer.ids) < ENDLESS


@pytest.mark.parametrize("role", ROLES)
def test_a_process_killed_while_idle_comes_back_and_the_next_request_works(
    tiny_system: System, expected: list[int], role: Role
) -> None:
    before = {other: tiny_system.pid(other) for other in ROLES}
    with tiny_system.restart(role):
        pass
    assert good(tiny_system).ids == expected
    assert {other for other in ROLES if tiny_system.pid(other) != before[other]} == {role}, "others were restarted too"


@pytest.mark.parametrize("role", ROLES)
def test_a_process_killed_during_requests_ends_them_with_unavailable(
    tiny_system: System, expected: list[int], role: Role
) -> None:
    streams = start_streams(tiny_system.client)
    since = time.monotonic()
    with tiny_system.restart(role):
        assert_ended(streams, since)
    assert good(tiny_system).ids == expected


@pytest.mark.parametrize("role", ["memmgr", "executor"])
def test_a_frozen_process_counts_as_dead_until_it_moves_again(tiny_system: System, expected: list[int], role: Role) -> None:
    streams = start_streams(tiny_system.client)
    since = time.monotonic()
    frozen = tiny_system.signal(role, signal.SIGSTOP)
    try:
        assert_ended(streams, since)
        assert not tiny_system.serving()
        begun = time.monotonic()
        assert ask(tiny_system.client, greedy([1, 2], 2), timeout=30).code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - begun < 1
    finally:
        frozen.send_signal(signal.SIGCONT)
    tiny_system.wait_serving()
    assert good(tiny_system).ids == expected
    assert tiny_system.pid(role) == frozen.pid


def test_the_requests_of_a_frozen_gateway_are_freed(tiny_system: System, expected: list[int]) -> None:
    streams = start_streams(tiny_system.client)
    frozen = tiny_system.signal("gateway", signal.SIGSTOP)
    try:
        wait_until(lambda: tiny_system.admin.pool().running == 0, NOTICED_SECONDS, "an end of what nobody reads")
        assert tiny_system.admin.pool().live_blocks == 0
    finally:
        frozen.send_signal(signal.SIGCONT)
    for stream in streams:
        assert stream.wait(30).code is grpc.StatusCode.UNAVAILABLE
    tiny_system.wait_serving()
    assert good(tiny_system).ids == expected


def test_a_busy_system_is_not_taken_for_a_dead_one(tiny_system: System, expected: list[int]) -> None:
    """A hundred streams, texts that cost seconds and hundreds of megabytes to tokenize, and questions all the while."""
    client, streams = tiny_system.client, [greedy([number, 2, 3], 60) for number in range(100)]
    text = "largo " * 200_000
    with ThreadPoolExecutor(3) as working:
        answers = working.submit(ask_all, client, streams)
        sizes = [working.submit(lambda: len(client.tokenize(text))) for _ in range(2)]
        asked = 0
        while not (asked and answers.done() and all(size.done() for size in sizes)):
            assert tiny_system.serving()
            pool = tiny_system.admin.pool()
            assert pool.executor_connected
            assert pool.free_blocks + pool.live_blocks + pool.cached_blocks == pool.total_blocks
            asked += 1
            time.sleep(0.02)
    assert [(one.code, len(one.ids)) for one in answers.result()] == [(grpc.StatusCode.OK, 60)] * len(streams)
    assert [size.result() for size in sizes] == [len(text)] * 2
    assert good(tiny_system).ids == expected


def test_admin_calls_that_are_given_up_do_no_harm(tiny_system: System, expected: list[int]) -> None:
    memmgr = tiny_system.pid("memmgr")
    with grpc.insecure_channel(str(tiny_system.admin_address)) as channel:
        stub = AdminStub(channel)
        for number in range(40):
            with suppress(grpc.RpcError):
                stub.Verify(VerifyRequest(with_executor=True), timeout=0.0005 * number)
    assert good(tiny_system).ids == expected
    assert tiny_system.pid("memmgr") == memmgr
