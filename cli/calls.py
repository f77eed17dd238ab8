"""What the client commands have in common: where the server is, who asks, and answers as JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from cli.options import DEFAULT_ADMIN, DEFAULT_SERVER, Decorator, Parsed, flag, target, together
from kilburn.errors import KilburnError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kilburn.client import AdminClient, Client

server_option: Final = flag("--server", type=Parsed("address", target), default=DEFAULT_SERVER, help="The gateway's address.")
admin_option: Final = flag("--admin-server", type=Parsed("address", target), default=DEFAULT_ADMIN, help="memmgr's address.")
tenant_option: Final = flag("--tenant", default="", help="Who asks; else the server's default tenant.")
json_option: Final[Decorator] = click.option("--json", "as_json", is_flag=True, help="One JSON value for programs.")


#: The flags of all commands that ask memmgr: `admin_server`, `tenant`, `as_json`.
admin_command: Final = together(admin_option, tenant_option, json_option)


class UnreachableError(KilburnError):
    """No server answers."""


def print_json(value: object) -> None:
    """Print one JSON value on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def plain(message: "Message") -> dict[str, object]:
    """Return a message as a JSON object: the proto's field names, fields at their defaults included, bytes in base64.

    64-bit integers are numbers, where protobuf's own mapping has strings: Python and jq read them as they are, and protobuf's
    parsers take both.
    """
    from google.protobuf.json_format import MessageToDict

    value = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(value, message.DESCRIPTOR.fields_by_name)


def plain_list(messages: "Iterable[Message]") -> list[dict[str, object]]:
    """Return messages as a JSON array's elements."""
    return [plain(message) for message in messages]


def _with_numbers(value: Mapping[str, object], fields: Mapping[str, Any]) -> dict[str, object]:
    return {name: _with_number(part, fields[name]) for name, part in value.items()}


def _with_number(value: object, field: Any) -> object:  # noqa: ANN401 - descriptors have two classes
    if isinstance(value, list):
        return [_with_number(part, field) for part in value]
    if isinstance(value, dict) and field.message_type is not None:
        return _with_numbers(value, field.message_type.fields_by_name)
    if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        return int(str(value))
    return value


@contextmanager
def admin_client(target: str, tenant: str) -> "Iterator[AdminClient]":
    """Give a client of the memory manager; where nothing answers there, say so in a line."""
    from kilburn.client import AdminClient

    with AdminClient(target, tenant) as client, _told_where(target, "memory manager", "--admin-server"):
        yield client


@contextmanager
def gateway_client(target: str, tenant: str) -> "Iterator[Client]":
    """Give a client of the gateway; where nothing answers there, say so in a line."""
    from kilburn.client import Client

    with Client(target, tenant) as client, _told_where(target, "gateway", "--server"):
        yield client


@contextmanager
def _told_where(target: str, service: str, option: str) -> "Iterator[None]":
    """Turn the failure to reach a server, or the right one, into one line.

    Raises:
        UnreachableError: instead of gRPC's own error, where no server of ours has answered.
    """
    import grpc

    from kilburn.reasons import ERROR_KEY

    try:
        yield
    except grpc.RpcError as error:
        call: Any = error  # it is grpc's Call as well
        ours = any(key == ERROR_KEY for key, _ in call.trailing_metadata() or ())
        if call.code() is grpc.StatusCode.UNIMPLEMENTED and not ours:
            raise UnreachableError(
                f"what answers at {target} is no {service}; it may be the other server: {option} is the {service}'s address"
            ) from error
        if call.code() is not grpc.StatusCode.UNAVAILABLE or ours:
            raise
        raise UnreachableError(
            f"no {service} answers at {target}; `kilburn up` starts one, {option} says where another one is"
        ) from error
