"""The order of the tests: what needs neither processes nor the default model comes first, so that a slip is seen in seconds.

And how hypothesis looks for examples where faults are planted (tests/memmgr/plant.py): always the same, none made smaller.
"""

import pytest
from hypothesis import Phase, settings

settings.register_profile("plant", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort stably: pure tests, then those with real processes, then those with the default model."""
    items.sort(key=_weight)


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("model"):
        return 2
    return 1 if item.get_closest_marker("processes") else 0
