"""deploy/requirements.py: what each image installs before it sees the source."""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "deploy/requirements.py"
_PYPROJECT = """
[build-system]
requires = ["builder>=1"]
[project]
name = "thing"
dependencies = ["base>=1"]
[project.optional-dependencies]
left = ["l>=1"]
right = ["r>=1", "s"]
both = ["thing[left,right]"]
"""


@pytest.fixture(scope="module")
def requirements() -> Callable[[str, Sequence[str]], list[str]]:
    script: dict[str, Any] = runpy.run_path(str(_SCRIPT))
    function: Callable[[str, Sequence[str]], list[str]] = script["requirements"]
    return function


def _names(lines: Sequence[str]) -> set[str]:
    return {re.split(r"[<>=~!\[; ]", line)[0] for line in lines}


def _printed(*wanted: str) -> set[str]:
    command = [sys.executable, str(_SCRIPT), str(_ROOT / "pyproject.toml"), *wanted]
    return _names(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines())


def test_memmgr_needs_no_torch_and_no_transformers() -> None:
    assert _printed() >= {"grpcio", "protobuf", "pyzmq"}
    assert not _printed() & {"torch", "transformers", "safetensors"}


def test_the_gateway_needs_the_tokenizer_and_no_torch() -> None:
    assert "transformers" in _printed("gateway")
    assert "torch" not in _printed("gateway")


def test_the_executor_needs_torch() -> None:
    assert _printed("executor") >= {"torch", "transformers"}


def test_extras_follow_the_projects_own(requirements: Callable[[str, Sequence[str]], list[str]]) -> None:
    assert requirements(_PYPROJECT, []) == ["base>=1"]
    assert requirements(_PYPROJECT, ["left", "right"]) == ["base>=1", "l>=1", "r>=1", "s"]
    assert requirements(_PYPROJECT, ["--build"]) == ["builder>=1"]


@pytest.mark.parametrize(("extra", "reason"), [("none", "no extra 'none'"), ("both", "names the project itself")])
def test_what_cannot_be_installed_without_the_source_is_refused(
    requirements: Callable[[str, Sequence[str]], list[str]], extra: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        requirements(_PYPROJECT, [extra])
