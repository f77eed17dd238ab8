"""Backends by name."""

import pytest

from kernels.registry import BackendError, create


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_reference_is_there(name: str) -> None:
    assert create(name).name == "reference"


@pytest.mark.parametrize("name", ["cpu"])
def test_what_does_not_exist_yet_is_refused(name: str) -> None:
    with pytest.raises(BackendError, match=f"--attention {name} is not part of this version"):
        create(name)


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(BackendError, match="--attention flash: there is no such backend; one of auto, reference"):
        create("flash")
