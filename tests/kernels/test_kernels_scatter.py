"""Paging does not touch the math: the same kernel on the same data gives the same bits wherever the blocks lie."""

from dataclasses import replace
from typing import Final

import pytest
import torch

from kernels.interface import LayerShape
from tests.kernels import backends
from tests.kernels.backends import Subject
from tests.kernels.cases import Case, Scatter, Sequence, outputs, step_of

STEPS: Final = {
    "decodes": (Sequence(130, 1), Sequence(6, 1), Sequence(47, 1)),
    "chunks": (Sequence(0, 50), Sequence(33, 20)),
    "mixed": (Sequence(70, 1), Sequence(15, 1), Sequence(40, 18), Sequence(0, 7)),
    "split": (Sequence(1100, 1), Sequence(900, 3)),
}

SHAPES: Final = {
    "9x3x64-bfloat16-blocks-of-16": Case((), (LayerShape(3, 64, 64),), group=3, block_size=16, dtype=torch.bfloat16),
    "8x1x80-float16-blocks-of-7": Case((), (LayerShape(1, 80, 80),), group=8, block_size=7, dtype=torch.float16, window=40),
    "2x2x128-float32-blocks-of-32": Case((), (LayerShape(2, 128, 128),), block_size=32, softcap=5.0, sinks=True),
}


SCATTERED: Final[tuple[Scatter, ...]] = ("shuffled", "sparse")

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.mark.parametrize("subject", backends.parameters([*backends.NATIVE, "triton-gpu"]), indirect=True)
@every_shape
@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_where_blocks_lie(
    subject: Subject, sequences: tuple[Sequence, ...], shape: Case, threads: int
) -> None:
    compare(subject, replace(shape, sequences=sequences, threads=threads))


@every_shape
@pytest.mark.parametrize("subject", backends.parameters(["triton-interpreted"]), indirect=True)
def test_bits_do_not_depend_on_where_blocks_lie_in_the_interpreter(subject: Subject, shape: Case) -> None:
    """Which has no time for more than one step of each shape."""
    compare(subject, replace(shape, sequences=STEPS["mixed"]))


def compare(subject: Subject, case: Case) -> None:
    step = step_of(case)
    (ordered,) = outputs(subject.backend, step, "ordered", subject.device)
    assert not ordered.isnan().any()
    for scatter in SCATTERED:
        (scattered,) = outputs(subject.backend, step, scatter, subject.device)
        assert torch.equal(ordered, scattered)
