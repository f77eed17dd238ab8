"""The faults that `make faults` plants can all be planted still."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.memmgr.memmgr_faults import FAULTS, Fault, RottenFaultError
from tests.memmgr.plant import TESTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert fault.old != fault.new
    compile(fault.applied(), fault.file, "exec")


def test_each_fault_has_a_name_and_a_place_of_its_own() -> None:
    assert Counter(fault.name for fault in FAULTS).most_common(1)[0][1] == 1
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.parametrize("text", ["", "a line\na line\n"])
def test_a_fault_whose_text_is_gone_or_not_alone_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(RottenFaultError, match="a name: its text stands"):
        Fault("a name", "file.py", "a line", "another").applied(tmp_path)


def test_the_tests_that_are_to_catch_them_exist() -> None:
    here = Path(__file__).parent
    assert all((here / f"test_memmgr_{name}.py").exists() for name in TESTS)
