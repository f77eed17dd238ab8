"""Starts: in any order, two at once, and refused where the model is at fault (tests/cli has what is wrong with flags); ends."""

import itertools
import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from kilburn.wire import endpoints
from tests.e2e.calls import ask, greedy
from tests.e2e.place import ROLES, Role
from tests.e2e.system import Processes, Refusal, System, refusal

pytestmark = pytest.mark.processes

#: Long enough for memmgr and the gateway to be up before the next process is started.
PAUSE_SECONDS = 1.5


@pytest.mark.parametrize("order", list(itertools.permutations(ROLES)), ids="-".join)
def test_any_order_of_starts_works_and_the_first_sign_of_health_is_true(tiny: Path, order: tuple[Role, ...]) -> None:
    with Processes({"model": tiny, "device": "cpu", "num_blocks": 64}, threads=1) as system:
        for role in order:
            system.start(role)
            time.sleep(PAUSE_SECONDS)
        system.connect()
        system.wait_serving()
        answer = ask(system.client, greedy([1, 2, 3], 4))
        assert answer.code is grpc.StatusCode.OK, answer.details
        assert len(answer.ids) == 4
        system.settled()


def test_two_instances_started_at_once_work_apart(tiny: Path, tmp_path: Path) -> None:
    from tests.e2e.tiny import save

    other = save(tmp_path / "other", seed=1)
    first = System({"model": tiny, "device": "cpu", "num_blocks": 64}, threads=1)
    second = System({"model": other, "device": "cpu", "num_blocks": 96}, threads=1)
    prompt = [5, 6, 7, 8]
    with ExitStack() as stack:
        stack.callback(first.abandon)  # for the case that the second does not start
        first.begin()
        stack.enter_context(second)
        with first:
            assert (first.client.model().total_blocks, second.client.model().total_blocks) == (64, 96)
            answers = [ask(system.client, greedy(prompt, 20)).ids for system in (first, second)]
            assert answers[0] != answers[1]
            first.settled()
        assert ask(second.client, greedy(prompt, 20)).ids == answers[1]
        second.settled()


def test_an_orderly_end_is_no_reason_for_a_warning(tiny: Path) -> None:
    with System({"model": tiny, "device": "cpu", "num_blocks": 64, "log_format": "json"}, threads=1) as system:
        assert len(ask(system.client, greedy([1, 2, 3], 4)).ids) == 4
        system.stop()
        lines = system.whole_log().splitlines()
    assert {json.loads(line)["process"] for line in lines if line.startswith("{")} == set(ROLES)
    # Another line is supervisord's, which tells of warnings and worse only, or a traceback.
    assert [line for line in lines if not line.startswith("{") or json.loads(line)["level"] not in ("debug", "info")] == []


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "damaged")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_truncated_file_of_the_model_is_refused(damaged: Path, file: str) -> None:
    path = damaged / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert_clear(refusal({"model": damaged}), str(damaged))


def test_a_missing_file_of_the_model_is_named(damaged: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    assert_clear(refusal({"model": damaged}), "tokenizer.json")


def test_an_unknown_model_is_named() -> None:
    assert_clear(refusal({"model": "no-such-model"}), "no-such-model")


def test_a_runtime_folder_with_a_long_name_that_is_not_ascii_works(tiny: Path) -> None:
    with System({"model": tiny, "device": "cpu", "num_blocks": 64}, threads=1, folder=f"Föhn {'x' * 120}") as system:
        assert len(str(system.place.runtime_dir)) > 120
        assert endpoints.socket_dir(system.place.runtime_dir) != system.place.runtime_dir
        assert len(ask(system.client, greedy([1, 2, 3], 4)).ids) == 4


def assert_clear(refused: Refusal, word: str) -> None:
    """Insist on exit status 2, a last line for people that names what is wrong, and nothing left."""
    assert refused.status == 2, refused.text
    assert refused.last_line.startswith("kilburn: "), refused.text
    assert word in refused.last_line
    assert "Traceback" not in refused.text
    assert not refused.leftovers
