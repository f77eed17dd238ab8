"""compose.yaml, .env and the Dockerfile as they are written: quick, no engine. The engine's test is test_deploy_engine.py."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cli import services

_ROOT = Path(__file__).parents[2]
_PROFILES = {"gpu": {"memmgr", "executor", "gateway"}, "cpu": {"memmgr", "executor-cpu", "gateway"}}
_ROLE = {"memmgr": "memmgr", "executor": "executor", "executor-cpu": "executor", "gateway": "gateway"}
_SOCKETS = "/run/kilburn"
_POOL = "/var/lib/kilburn/pool"

Service = dict[str, Any]


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((_ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def _services() -> dict[str, Service]:
    services: dict[str, Service] = _compose()["services"]
    return services


def _tool() -> list[str] | None:
    """Return compose's command, if this machine has one; it reads files without an engine."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = ["docker", "compose"]
    if (
        shutil.which("docker")
        and subprocess.run([*plugin, "version"], capture_output=True, timeout=30, check=False).returncode == 0
    ):
        return plugin
    return None


def _profiles_of(service: Service) -> set[str]:
    return set(service.get("profiles", _PROFILES))


def _mounts(service: Service) -> dict[str, tuple[str, bool]]:
    """Return target -> (source, whether it is read-only) of the short syntax; a source may hold a ${NAME:-default}."""
    mounts = {}
    for entry in service["volumes"]:
        match = re.fullmatch(r"(\$\{[^}]*\}|[^:]+):([^:]+)(:ro)?", entry)
        assert match, entry
        mounts[match[2]] = (match[1], match[3] is not None)
    return mounts


def _dockerfile() -> str:
    return (_ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")


def _uid() -> str:
    match = re.search(r"useradd --uid (\d+) --gid (\d+)", _dockerfile())
    assert match
    assert match[1] == match[2]
    return match[1]


@pytest.mark.parametrize("profile", sorted(_PROFILES))
def test_each_profile_has_one_service_for_each_process(profile: str) -> None:
    active = {name for name, service in _services().items() if profile in _profiles_of(service)}
    assert active == _PROFILES[profile]


def test_plain_up_takes_the_gpu() -> None:
    lines = (_ROOT / ".env").read_text(encoding="utf-8").splitlines()
    assert "COMPOSE_PROFILES=gpu" in lines


@pytest.mark.parametrize("name", sorted(_ROLE))
def test_a_service_runs_its_process_and_asks_it_for_its_health(name: str) -> None:
    service = _services()[name]
    target = service["build"]["target"]
    stage = re.search(rf"^FROM \S+ AS {re.escape(target)}$(.*?)(?=^FROM |\Z)", _dockerfile(), re.MULTILINE | re.DOTALL)
    assert stage, f"the Dockerfile has no target {target}"
    assert f'CMD ["{_ROLE[name]}"]' in stage[1]
    assert "\nUSER kilburn\n" in stage[1]
    check = service["healthcheck"]
    assert check["test"] == ["CMD", "kilburn", "health", _ROLE[name]]
    assert {"interval", "timeout", "retries", "start_period"} <= check.keys()


@pytest.mark.parametrize("name", sorted(_ROLE))
def test_a_service_may_do_little_and_comes_back(name: str) -> None:
    service = _services()[name]
    assert service["user"] == f"{_uid()}:{_uid()}"
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["restart"] == "unless-stopped"
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()


def test_services_start_by_health_and_wait_for_nothing_that_a_profile_lacks() -> None:
    services = _services()
    for name in ("executor", "executor-cpu", "gateway"):
        assert services[name]["depends_on"] == {"memmgr": {"condition": "service_healthy"}}
    for service in services.values():
        for other in service.get("depends_on", {}):
            assert _profiles_of(service) <= _profiles_of(services[other])


def test_only_the_gpu_profile_reserves_an_nvidia_gpu() -> None:
    services = _services()
    (device,) = services["executor"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert services["executor"]["environment"]["KILBURN_DEVICE"] == "cuda"
    assert services["executor-cpu"]["environment"]["KILBURN_DEVICE"] == "cpu"
    assert not any("deploy" in service for name, service in services.items() if name != "executor")


def test_all_meet_in_one_private_socket_folder() -> None:
    compose = _compose()
    for service in compose["services"].values():
        assert _mounts(service)[_SOCKETS] == ("sockets", False)
    options = compose["volumes"]["sockets"]["driver_opts"]["o"].split(",")
    assert {"mode=0700", f"uid={_uid()}", f"gid={_uid()}"} <= set(options)
    assert f"KILBURN_RUNTIME_DIR={_SOCKETS}" in _dockerfile()


def test_memmgr_holds_the_sized_memory_of_the_pool_beside_its_executor() -> None:
    compose = _compose()
    services = compose["services"]
    assert _mounts(services["executor-cpu"])[_POOL] == ("pool", False)
    assert services["executor-cpu"]["environment"]["KILBURN_POOL_DIR"] == _POOL
    assert _mounts(services["memmgr"])[_POOL] == ("pool", True)
    options = compose["volumes"]["pool"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert re.search(r"(^|,)size=", options["o"])
    assert {"mode=0700", f"uid={_uid()}"} <= set(options["o"].split(","))


def test_the_gateway_reads_the_models_that_the_executor_keeps() -> None:
    services = _services()
    source, read_only = _mounts(services["gateway"])["/models"]
    assert read_only
    for name in ("executor", "executor-cpu"):
        assert _mounts(services[name])["/models"] == (source, False)
        assert services[name]["environment"].keys() >= services["gateway"]["environment"].keys() - {"KILBURN_LISTEN"}


def test_ports_are_published_to_this_host_alone_unless_asked() -> None:
    services = _services()
    assert services["gateway"]["ports"] == ["${KILBURN_BIND:-127.0.0.1}:${KILBURN_PORT:-50051}:50051"]
    assert services["memmgr"]["ports"] == ["${KILBURN_BIND:-127.0.0.1}:${KILBURN_ADMIN_PORT:-50052}:50052"]
    assert not any("ports" in services[name] for name in ("executor", "executor-cpu"))
    assert services["gateway"]["environment"]["KILBURN_LISTEN"] == "0.0.0.0:50051"
    assert services["memmgr"]["environment"]["KILBURN_ADMIN"] == "0.0.0.0:50052"


@pytest.mark.parametrize("name", sorted(_ROLE))
def test_what_a_service_is_told_are_flags_of_its_command(name: str) -> None:
    command = {"memmgr": services.memmgr, "executor": services.executor, "gateway": services.gateway}[_ROLE[name]]
    flags = {option.envvar for option in command.params if isinstance(option, click.Option)}
    assert set(_services()[name]["environment"]) <= flags


def test_the_images_get_every_package_of_the_wheel() -> None:
    pyproject = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ignored = (_ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for package in packages:
        assert f"COPY {package} /src/{package}" in _dockerfile()
        assert f"!{package}" in ignored


@pytest.mark.parametrize("profile", sorted(_PROFILES))
def test_compose_itself_accepts_the_file(profile: str) -> None:
    tool = _tool()
    if tool is None:
        pytest.skip("needs docker-compose or docker compose")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KILBURN_")}
    environment["COMPOSE_PROFILES"] = profile
    done = subprocess.run([*tool, "config"], cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert services.keys() >= _PROFILES[profile]
    if profile == "gpu":
        (device,) = services["executor"]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
