"""Why admin calls are refused: a status, a stable code in the trailing metadata, one line, and the field that is at fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from kilburn.config import Address
from kilburn.v1 import admin_pb2 as admin
from kilburn.v1 import admin_pb2_grpc
from tests.memmgr.conftest import House
from tests.memmgr.memmgr_peers import PATIENCE_SECONDS
from tests.memmgr.test_memmgr_admin import address, stub
from tests.memmgr.test_memmgr_admin_prefixes import SHORT, Stub, ask_probe, pin, serve, unpin, working
from tests.memmgr.test_memmgr_admin_quotas import set_quota

__all__ = ["address", "stub", "working"]  # fixtures

Status = grpc.StatusCode


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, str, str]:
    """Return status, code, field and message of a call that is refused."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value  # it is grpc's Call as well
    metadata = dict(error.trailing_metadata())
    return error.code(), str(metadata.get("kilburn-error")), str(metadata.get("kilburn-field", "")), error.details() or ""


def get_sequence(stub: Stub, **fields: object) -> object:
    return stub.GetSequence(admin.GetSequenceRequest(request_id="a", **fields), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]


def watch(stub: Stub, cursor: int = 0) -> object:
    return next(stub.WatchEvents(admin.WatchEventsRequest(cursor=cursor), timeout=PATIENCE_SECONDS))


@pytest.mark.usefixtures("working")
def test_each_refusal_has_its_code(stub: Stub, house: House) -> None:
    serve(house, list(range(10)))
    cases: list[tuple[Callable[[], object], tuple[grpc.StatusCode, str, str]]] = [
        (partial(ask_probe, stub, []), (Status.INVALID_ARGUMENT, "empty-prompt", "token_ids")),
        (partial(ask_probe, stub, [2**31]), (Status.INVALID_ARGUMENT, "unknown-token", "token_ids")),
        (partial(ask_probe, stub, [1], n=2**20), (Status.INVALID_ARGUMENT, "invalid-value", "n")),
        (partial(ask_probe, stub, [1], cache_salt="x" * 129), (Status.INVALID_ARGUMENT, "invalid-value", "cache_salt")),
        (partial(pin, stub, [1], ttl_seconds=-1), (Status.INVALID_ARGUMENT, "invalid-value", "ttl_seconds")),
        (partial(pin, stub, [1], ttl_seconds=1e308), (Status.INVALID_ARGUMENT, "invalid-value", "ttl_seconds")),
        (partial(pin, stub, [40, 41, 42, 43, 44]), (Status.NOT_FOUND, "not-cached", "")),
        (partial(unpin, stub, "x"), (Status.NOT_FOUND, "no-such-pin", "pin_id")),
        (partial(get_sequence, stub), (Status.NOT_FOUND, "no-such-sequence", "")),
        (partial(stub.ExplainBlock, admin.ExplainBlockRequest(block=99)), (Status.NOT_FOUND, "no-such-block", "block")),
        (partial(watch, stub, 2**40), (Status.OUT_OF_RANGE, "unknown-cursor", "cursor")),
        (partial(set_quota, stub, "a", guaranteed_blocks=99), (Status.FAILED_PRECONDITION, "too-much-guaranteed", "")),
        (
            partial(set_quota, stub, "a", guaranteed_blocks=2, max_blocks=1),
            (Status.INVALID_ARGUMENT, "invalid-value", "guaranteed_blocks"),
        ),
    ]
    for call, expected in cases:
        assert refusal(call)[:3] == expected


def test_without_an_executor_the_pool_is_not_served(stub: Stub) -> None:
    assert refusal(partial(ask_probe, stub, [1]))[:2] == (Status.UNAVAILABLE, "not-serving")


@pytest.mark.usefixtures("working")
@pytest.mark.parametrize(
    ("tenant", "words"), [("   ", "only blanks"), ("a\tb", "printable ASCII"), ("x" * 129, "129 characters")]
)
def test_a_tenant_that_can_be_none(stub: Stub, tenant: str, words: str) -> None:
    for call in (
        partial(ask_probe, stub, [1], tenant=tenant),
        partial(pin, stub, [1], tenant=tenant),
        partial(get_sequence, stub, tenant=tenant),
        partial(set_quota, stub, tenant, max_blocks=1),
        partial(stub.CancelRequest, admin.CancelRequestRequest(request_id="a", tenant=tenant)),
    ):
        status, code, field, message = refusal(call)
        assert (status, code, field) == (Status.INVALID_ARGUMENT, "invalid-value", "tenant")
        assert words in message


def test_a_caller_that_can_be_none(stub: Stub) -> None:
    request = admin.CancelRequestRequest(request_id="a")
    for metadata in ((("kilburn-tenant", "a" * 129),), (("kilburn-tenant", "a"), ("kilburn-tenant", "b"))):
        refused = refusal(partial(stub.CancelRequest, request, metadata=metadata))
        assert refused[:3] == (Status.INVALID_ARGUMENT, "invalid-value", "kilburn-tenant")
    assert not stub.CancelRequest(request, metadata=(("kilburn-tenant", "a"),)).found


def test_what_is_no_message(address: Address) -> None:
    with grpc.insecure_channel(str(address)) as channel:
        one: Any = channel.unary_unary("/kilburn.v1.Admin/GetPool")  # bytes as they are
        many: Any = channel.unary_stream("/kilburn.v1.Admin/ListPins")
        for call in partial(one, b"\xff\xff"), lambda: list(many(b"\xff\xff")):
            assert refusal(call)[:2] == (Status.INVALID_ARGUMENT, "malformed-message")


def test_our_own_fault_is_told_without_its_text(stub: Stub, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    background = house.executor(**SHORT)
    assert background.slots == {}

    def broken(*_: object) -> None:
        raise RuntimeError("the secret")

    monkeypatch.setattr(house.engine, "ask", broken)
    for call in (
        partial(stub.GetPool, admin.GetPoolRequest()),
        lambda: list(stub.ListQuotas(admin.ListQuotasRequest())),
    ):
        status, code, _, message = refusal(call)
        assert (status, code) == (Status.INTERNAL, "internal")
        assert "secret" not in message


def test_methods_of_other_services_are_left_alone(address: Address) -> None:
    with grpc.insecure_channel(str(address)) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        assert stub.GetPool(admin.GetPoolRequest(), timeout=PATIENCE_SECONDS).total_blocks == 0
        unknown: Any = channel.unary_unary("/kilburn.v1.Admin/NoSuchMethod")
        with pytest.raises(grpc.RpcError) as raised:
            unknown(b"", timeout=PATIENCE_SECONDS)
        assert raised.value.code() is Status.UNIMPLEMENTED


def test_an_enum_value_that_there_is_not(stub: Stub) -> None:
    for call, expected in (
        (lambda: list(stub.ListSequences(admin.ListSequencesRequest(state=99))), ("state", "SequenceState has 0 to 5")),  # type: ignore[arg-type]
        (lambda: list(stub.ListBlocks(admin.ListBlocksRequest(state=-7))), ("state", "state is -7; BlockState has 0 to 3")),  # type: ignore[arg-type]
        (lambda: list(stub.WatchEvents(admin.WatchEventsRequest(kinds=[1, 77]))), ("kinds", "kinds is 77")),  # type: ignore[list-item]
    ):
        status, code, field, message = refusal(call)
        assert (status, code, field) == (Status.INVALID_ARGUMENT, "invalid-value", expected[0])
        assert expected[1] in message
