"""Systems that several tests share. Each is started when the first test asks for it, and must be left settled by every test."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.e2e import rounds
from tests.e2e.corpus import Expected, read_expected
from tests.e2e.system import Instance, System
from tests.e2e.tapped import MAX_RUNNING, Tapped, tapped_system

AnyInstance = TypeVar("AnyInstance", bound=Instance)

#: One of each kind: a single token, text, chat, other scripts, a whole block, and the longest.
_CHOSEN = ("one-token", "code-python", "chat-turns", "unicode-cjk", "part-112", "part-321")


@pytest.fixture(scope="session")
def chosen() -> list[Expected]:
    """Return six of the exactness prompts."""
    prompts = [prompt for prompt in read_expected() if prompt.name in _CHOSEN]
    assert len(prompts) == len(_CHOSEN)
    return prompts


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model with random weights."""
    from tests.e2e.tiny import save

    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def default_model() -> None:
    """Fetch and convert the default model, so that no start of a server has to."""
    from executor.fetch import ensure_model
    from kilburn.config import DEFAULT_MODEL

    ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def _tiny_system(tiny: Path) -> Iterator[System]:
    with System({"model": tiny, "device": "cpu", "num_blocks": 4096}, threads=1) as system:
        yield system


@pytest.fixture
def tiny_system(_tiny_system: System) -> Iterator[System]:
    """Return a system with the tiny model; it can be broken, as long as it comes back."""
    yield from _left_settled(_tiny_system)


@pytest.fixture(scope="session")
def _ample(default_model: None, chosen: list[Expected]) -> Iterator[System]:
    with System(rounds.flags(16, max(1024, rounds.ample_pool(chosen, 16)))) as system:
        yield system


@pytest.fixture
def ample(_ample: System) -> Iterator[System]:
    """Return a system in float32 with blocks of 16, which has room for whatever a test sends."""
    yield from _left_settled(_ample)


@pytest.fixture(scope="session")
def _small(default_model: None, chosen: list[Expected]) -> Iterator[System]:
    with System(rounds.flags(7, rounds.smallest_pool(chosen, 7), poison=True)) as system:
        yield system


@pytest.fixture
def small(_small: System) -> Iterator[System]:
    """Return a system in float32 with blocks of 7, in the smallest pool for the longest prompt, NaN in all that is unwritten."""
    yield from _left_settled(_small)


def _left_settled(system: AnyInstance) -> Iterator[AnyInstance]:
    yield system
    system.settled()


@pytest.fixture(scope="session")
def _tapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tapped]:
    from tests.e2e.tiny import save

    model = save(tmp_path_factory.mktemp("wider"), layers=8, width=256)
    with tapped_system({"model": model, "device": "cpu", "num_blocks": 1024, "max_running": MAX_RUNNING}) as tapped:
        yield tapped


@pytest.fixture
def tapped(_tapped: Tapped) -> Iterator[Tapped]:
    """Return a system whose plans can be read. Its model is large enough that a step takes far longer than a message."""
    yield _tapped
    _tapped.system.settled()
