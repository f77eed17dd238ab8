"""One thread, as tiny tensors gain nothing from a second and lose much to it on a busy machine; the attention of a test."""

from typing import Any

import pytest
import torch

from kernels.interface import AttentionBackend
from tests.kernels import backends


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=backends.NATIVE)
def backend(request: pytest.FixtureRequest) -> AttentionBackend[Any]:
    """Return the reference, and each instruction set of the native backend that this machine has."""
    return backends.make(request.param).backend
