"""The benchmark of a step's parts runs, on a tiny model, and its parts make sense."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.place import ROOT, Place

pytestmark = pytest.mark.processes


def test_the_parts_of_a_step_are_measured(tiny: Path) -> None:
    place = Place("run")
    flags = ["--model", str(tiny), "--device", "cpu", "--num-blocks", "256"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.steps", "--json", "--running", "1", "--running", "4", *flags],
            cwd=ROOT,
            env=place.environment(threads=1),
            stdout=subprocess.PIPE,
            timeout=240,
            check=True,
        )
        assert not place.processes()
    finally:
        place.kill()
        place.remove()
    points = json.loads(done.stdout)["points"]
    assert [point["running"] for point in points] == [1, 4]
    for point in points:
        parts = point["parts_ms"]
        assert set(parts) == {"planning", "applying", "transport", "prepare", "forward", "sample", "idle"}
        assert all(value >= 0 for value in parts.values())
        assert parts["forward"] > 0
        assert point["steps"] > 0
