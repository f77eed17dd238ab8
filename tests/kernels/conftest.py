"""One thread, as tiny tensors gain nothing from a second; Triton's interpreter where there is no GPU; the backend of a test."""

import os

import pytest
import torch

from tests.kernels import backends
from tests.kernels.backends import Subject

# Triton reads it once, when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """Return the backend that the test is parametrized with (`backends.parameters`)."""
    return backends.make(request.param)
