"""Whether an instance answers: the three services' health as each of them tells it. One short call, no waiting."""

import json
from pathlib import Path
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kilburn.config import Address, parse_address
from kilburn.errors import StartError

#: A healthy server on this machine answers in milliseconds.
CALL_TIMEOUT_SECONDS: Final = 2.0

NOTHING_ANSWERS: Final = "nothing answers"

#: The executor writes its health file once a second or so.
_FRESH_SECONDS: Final = 5.0


def reachable(address: Address) -> str:
    """Return where a client on this machine reaches a server that listens on `address`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104
    return str(Address(host, address.port))


def listening(address: Address, file: Path) -> str:
    """Return where to reach a server that was told to listen on `address`; for port 0, `file` has the one that it took.

    Raises:
        StartError: it is port 0, and there is no such file.
    """
    if address.port == 0:
        try:
            address = parse_address(file.read_text(encoding="ascii").strip())
        except OSError as error:
            raise StartError(f"{file}: there is none, so nothing listens there") from error
    return reachable(address)


def grpc_health(target: str) -> str:
    """Return "" where the server at `target` is serving, else why not."""
    with grpc.insecure_channel(target) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs lack the calls
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)  # grpc raises one object that is both
            if call.code() is grpc.StatusCode.UNAVAILABLE:
                return f"{NOTHING_ANSWERS} at {target}"
            return f"{target}: {call.code().name}: {call.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def executor_health(runtime_dir: Path, now: float) -> str:
    """Return "" where the executor of `runtime_dir` said lately that it runs and is connected, else why not. `now`: Unix time."""
    path = runtime_dir / "executor.health"
    try:
        health = json.loads(path.read_bytes())
        age, phase, connected = now - float(health["unix_time"]), health["phase"], health["connected"]
    except FileNotFoundError:
        return f"{path}: there is none"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path}: can't be read: {error}"
    if age > _FRESH_SECONDS:
        return f"{path}: {age:.0f} s old"
    if phase != "running":
        return f"the executor is {phase}"
    return "" if connected is True else "the executor is not connected to memmgr"
