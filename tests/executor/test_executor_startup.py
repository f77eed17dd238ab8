"""From a configuration to a runner: which attention is taken, and what the log says of it."""

from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from executor.progress import Progress
from executor.startup import ready
from kernels.cpu import library
from kilburn.config import ExecutorConfig
from tests.executor.executor_help import save_tiny
from tests.kernels.backends import need_cpu_library


def started(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """Start with everything on auto; return the attention's name, and what was warned of: events and reasons."""
    config = ExecutorConfig(
        runtime_dir=folder, executor_endpoint="ipc:///nowhere", model=str(save_tiny(folder / "tiny")), device="cpu", num_blocks=20
    )
    with capture_logs() as entries, ready(config, 1, Progress(), structlog.get_logger()) as made:
        name = made.info.attention_backend
    return name, [(entry["event"], entry["reason"]) for entry in entries if entry["log_level"] == "warning"]


def test_auto_is_the_native_one_on_a_cpu(tmp_path: Path) -> None:
    need_cpu_library()
    assert started(tmp_path) == ("cpu", [])


def test_without_its_library_the_reference_takes_over_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "they were not compiled: run `make compile`")
    name, [(event, reason)] = started(tmp_path)
    assert name == "reference"
    assert event == "attention is slower than it could be"
    assert reason == (
        "the native kernels for CPUs can't be used: they were not compiled: run `make compile`; "
        "until then attention is plain torch, several times slower"
    )
