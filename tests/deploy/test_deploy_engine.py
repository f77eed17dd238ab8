"""compose.yaml on a real container engine, on the CPU: all three come up, answer from outside, and come back.

Takes minutes and an engine at DOCKER_HOST (or the default socket), so it runs only where KILBURN_TEST_ENGINE=1 asks for it;
docs/deploy.md says how. It builds the images, starts a project of its own with ports of its own, and removes all but the images.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kilburn.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

_ROOT: Final = Path(__file__).parents[2]
_SERVICES: Final = ("memmgr", "executor-cpu", "gateway")
_MIB: Final = 2**20

#: A first build downloads torch and converts the model.
_BUILD_SECONDS: Final = 1500
_HEALTHY_SECONDS: Final = 300
_COMMAND_SECONDS: Final = 120

#: Two processors that ten others wanted too, of which containers get the share of one process, took 60 seconds.
_ANSWER_SECONDS: Final = 150

#: What an image may add to its base: memmgr has gRPC, ZeroMQ and numpy; the gateway transformers and the tokenizer as well.
_MEMMGR_BYTES: Final = 200 * _MIB
_GATEWAY_BYTES: Final = 450 * _MIB

#: Ends the process that the container's init has started; processes that `docker exec` starts have no parent in there.
_CRASH: Final = """
import os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
    pid, parent = int(status.parent.name), int(status.read_text().rpartition(")")[2].split()[1])
    if parent == 1:
        os.kill(pid, signal.SIGKILL)
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(_BUILD_SECONDS + 600),
    pytest.mark.skipif(
        os.environ.get("KILBURN_TEST_ENGINE") != "1", reason="needs a container engine; KILBURN_TEST_ENGINE=1 asks for it"
    ),
]


def _run(command: Sequence[str], seconds: float = _COMMAND_SECONDS, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=_ROOT, env=environment, timeout=seconds, check=False, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _wait(what: str, seconds: float, ready: Callable[[], bool], report: Callable[[], str] = lambda: "") -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s. {report()}"
        time.sleep(0.5)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Project:
    """One project of compose, run with the profile `cpu`."""

    name: str
    port: int
    admin_port: int
    memmgr_healthy: datetime | None = None  # when it was so first; the engine forgets all but the last five checks

    def compose(self, *arguments: str, seconds: float = _COMMAND_SECONDS) -> str:
        tool = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        files = ["-f", "compose.yaml", "-f", "tests/deploy/engine.yaml"]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KILBURN_")},
            "COMPOSE_PROFILES": "cpu",
            "KILBURN_PORT": str(self.port),
            "KILBURN_ADMIN_PORT": str(self.admin_port),
            "KILBURN_POOL_SIZE": "512m",
        }
        return _run([*tool, "-p", self.name, *files, *arguments], seconds, environment)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        (facts,) = json.loads(_run(["docker", "inspect", self.container(service)]))
        assert isinstance(facts, dict)
        return facts

    def inside(self, service: str, *command: str) -> str:
        return _run(["docker", "exec", self.container(service), *command])

    def crash(self, service: str) -> None:
        """Kill the process from inside: what `docker kill` stops stays stopped. Detached, for the killer dies with it."""
        _run(["docker", "exec", "--detach", self.container(service), "python", "-c", _CRASH])

    def image(self, service: str) -> dict[str, Any]:
        (facts,) = json.loads(_run(["docker", "image", "inspect", self.inspect(service)["Image"]]))
        assert isinstance(facts, dict)
        return facts

    def wait_healthy(self) -> None:
        """Wait until the engine calls all three healthy, and the gateway says so now: the engine asks only now and then."""
        _wait("healthy", _HEALTHY_SECONDS, self._healthy, lambda: self.compose("logs", "--tail=20"))

    def _healthy(self) -> bool:
        return all(self.inspect(service)["State"]["Health"]["Status"] == "healthy" for service in _SERVICES) and self._serving()

    def _serving(self) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                status: int = stub.Check(health_pb2.HealthCheckRequest(), timeout=2).status
            except grpc.RpcError:
                return False
        return status == health_pb2.HealthCheckResponse.SERVING

    def ask(self) -> str:
        """Return the answer to a question that comes from outside the containers."""
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="What is the capital of France?")])
        request = inference_pb2.GenerateRequest(
            chat=chat,
            sampling=inference_pb2.Sampling(temperature=0),
            stopping=inference_pb2.Stopping(max_tokens=24),
        )
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            parts = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=_ANSWER_SECONDS)
            return "".join(part.text for part in parts)

    def total_blocks(self) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{self.admin_port}") as channel:
            pool = admin_pb2_grpc.AdminStub(channel).GetPool(admin_pb2.GetPoolRequest(), timeout=10)
            return pool.total_blocks


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    running = Project("kilburn-test", _free_port(), _free_port())
    running.compose("down", "--volumes", "--timeout", "30")  # what a run that was killed has left
    try:
        running.compose("build", seconds=_BUILD_SECONDS)
        running.compose("up", "--detach", seconds=_HEALTHY_SECONDS)
        checks = running.inspect("memmgr")["State"]["Health"]["Log"]
        healthy = next((_time(check["End"]) for check in checks if check["ExitCode"] == 0), None)
        running.wait_healthy()
        yield replace(running, memmgr_healthy=healthy)
    finally:
        running.compose("down", "--volumes", "--timeout", "30")
    mark = f"label=com.docker.compose.project={running.name}"
    assert not _run(["docker", "ps", "--all", "--quiet", "--filter", mark])
    assert not _run(["docker", "volume", "ls", "--quiet", "--filter", mark])


def test_an_answer_comes_from_outside_the_containers(project: Project) -> None:
    assert "Paris" in project.ask()
    assert project.total_blocks() > 0


def test_the_executor_started_when_memmgr_was_healthy(project: Project) -> None:
    assert project.memmgr_healthy is not None
    assert project.memmgr_healthy <= _time(project.inspect("executor-cpu")["State"]["StartedAt"])


def test_no_process_is_root_or_may_write_outside_its_volumes(project: Project) -> None:
    for service in _SERVICES:
        assert project.inside(service, "id", "-u").strip() == "10001"
        assert project.inside(service, "sh", "-c", "touch /opt/kilburn/x 2>/dev/null || echo refused").strip() == "refused"
        assert project.inside(service, "stat", "-c", "%a %u", "/run/kilburn").split() == ["700", "10001"]


def test_images_hold_what_their_process_needs(project: Project) -> None:
    look = "import importlib.util as u; print([n for n in ('torch', 'transformers') if u.find_spec(n)])"
    found = {service: project.inside(service, "python", "-c", look).strip() for service in _SERVICES}
    assert found == {"memmgr": "[]", "gateway": "['transformers']", "executor-cpu": "['torch', 'transformers']"}
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
    base_bytes = int(_run(["docker", "image", "inspect", "--format", "{{.Size}}", base]))
    assert project.image("memmgr")["Size"] - base_bytes < _MEMMGR_BYTES
    assert project.image("gateway")["Size"] - base_bytes < _GATEWAY_BYTES


@pytest.mark.parametrize("service", _SERVICES)
def test_an_answer_comes_after_a_restart(project: Project, service: str) -> None:
    project.compose("restart", "--timeout", "30", service)
    project.wait_healthy()
    assert "Paris" in project.ask()


@pytest.mark.parametrize("service", _SERVICES)
def test_a_crashed_process_is_started_again(project: Project, service: str) -> None:
    restarts = project.inspect(service)["RestartCount"]
    total_blocks = project.total_blocks()
    project.crash(service)
    _wait("restarted", 60, lambda: project.inspect(service)["RestartCount"] > restarts)
    project.wait_healthy()
    assert "Paris" in project.ask()
    assert project.total_blocks() == total_blocks


def test_the_pools_memory_outlives_its_executor(project: Project) -> None:
    project.inside("executor-cpu", "touch", "/var/lib/kilburn/pool/kept")
    project.compose("restart", "--timeout", "30", "executor-cpu")
    assert "kept" in project.inside("memmgr", "ls", "/var/lib/kilburn/pool").split()
    project.wait_healthy()
    project.inside("executor-cpu", "rm", "/var/lib/kilburn/pool/kept")


def _time(text: str) -> datetime:
    """Read a time as engines write it: with nanoseconds, in UTC or with an offset."""
    seconds, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return datetime.fromisoformat(f"{seconds}.{digits[:6]:0<6}{rest[len(digits) :].replace('Z', '+00:00')}")
