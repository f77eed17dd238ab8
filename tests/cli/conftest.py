from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cli.cli_help import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A folder whose path is short, as a user's is, and has all that a configuration file might take for its own."""
    with TemporaryDirectory(prefix="kb-") as folder:
        yield Path(folder) / "a run; 100% #1"
