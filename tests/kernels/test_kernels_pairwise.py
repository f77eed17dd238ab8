"""Every backend against the float64 oracle, over everything that a step can be made of: every pair of values occurs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import pytest
import torch

from kernels.interface import LayerShape
from tests.kernels import backends, cases
from tests.kernels.backends import Subject
from tests.kernels.cases import Case, check
from tests.kernels.pairwise import all_pairs

#: `window` is in tokens, or in blocks; `length` moves a context that ends at an edge of a block.
VALUES: Final[Mapping[str, Sequence[Any]]] = {
    "group": (1, 2, 3, 5, 6, 7, 8, 16),
    "block_size": (1, 2, 7, 8, 16, 24, 32, 64, 128, 256),
    "key_size": (32, 64, 80, 96, 112, 128, 256),
    "kv_heads": (1, 2, 3),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "value_size": ("equal", 64, 128),
    "mix": ("decodes", "chunks", "mixed", "empty", "long"),
    "length": (-1, 0, 1),
    "window": (None, "one token", "few tokens", "one block", "more than there is"),
    "softcap": (None, 5.0),
    "sinks": (False, True),
    "scale": (None, 0.25),
    "scatter": ("ordered", "shuffled", "sparse"),
    "strides": ("contiguous", "joined", "transposed", "spread"),
    "layers": (1, 2),
    "threads": (1, 2, 3),
}

#: The interpreter takes some 9 ms for a program, so contexts stay short.
SMALL: Final = {**VALUES, "block_size": (1, 2, 7, 8, 16, 24, 32), "layers": (1,), "threads": (1,)}

WINDOWS: Final = {None: None, "one token": 1, "few tokens": 5, "more than there is": 10**6}


@dataclass(frozen=True)
class Size:
    """How much work a step may be."""

    chunk: int  # rows of the longest chunk
    context: int  # about the tokens of the longest context


FULL_SIZE: Final = Size(chunk=70, context=1500)
SMALL_SIZE: Final = Size(chunk=40, context=200)


def case_of(values: Mapping[str, Any], size: Size, seed: int) -> Case:
    """Return the step that a combination of values stands for."""
    key_size, block_size = values["key_size"], values["block_size"]
    value_size = key_size if values["value_size"] == "equal" else values["value_size"]
    layer = LayerShape(values["kv_heads"], key_size, value_size)
    return Case(
        sequences=tuple(sequences_of(values["mix"], block_size, values["length"], size)),
        layers=(layer, LayerShape(values["kv_heads"], key_size, key_size))[: values["layers"]],
        group=values["group"],
        block_size=block_size,
        dtype=values["dtype"],
        window=block_size if values["window"] == "one block" else WINDOWS[values["window"]],
        softcap=values["softcap"],
        sinks=values["sinks"],
        scale=values["scale"],
        scatter=values["scatter"],
        strides=values["strides"],
        threads=values["threads"],
        seed=seed,
    )


def sequences_of(mix: str, block_size: int, length: int, size: Size) -> list[cases.Sequence]:
    """Return sequences whose contexts, pasts and chunks end beside the edges of blocks."""

    def near(blocks: int) -> int:
        return max(1, blocks * block_size + length)

    def decode(context: int) -> cases.Sequence:
        return cases.Sequence(context - 1, 1)

    def chunk(context: int, rows: int) -> cases.Sequence:
        return cases.Sequence(context - min(rows, context), min(rows, context))

    long = size.context // block_size
    match mix:
        case "decodes":
            return [decode(near(1)), decode(near(3)), decode(near(2)), cases.Sequence(near(1), 1)]
        case "chunks":
            return [chunk(near(1), 3), chunk(near(3), size.chunk), cases.Sequence(near(1), 17)]
        case "mixed":
            return [chunk(near(2), 33), decode(near(1)), cases.Sequence(near(1), 2), decode(near(2)), chunk(near(1), size.chunk)]
        case "empty":
            return [cases.Sequence(0, min(near(blocks), size.chunk)) for blocks in (1, 2, 3)] + [decode(1)]
        case "long":
            return [decode(near(long)), decode(near(1)), chunk(near(long // 2), 9)]
        case _:
            raise AssertionError(mix)


def name_of(case: Case) -> str:
    layer = case.layers[0]
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{case.group}x{layer.kv_heads}-{layer.key_size}-{layer.value_size}-blocks-of-{case.block_size}-{dtype}"


CASES: Final = [case_of(values, FULL_SIZE, seed) for seed, values in enumerate(all_pairs(VALUES))]
SMALL_CASES: Final = [case_of(values, SMALL_SIZE, seed) for seed, values in enumerate(all_pairs(SMALL))]


@pytest.mark.parametrize("values", [VALUES, SMALL], ids=["all", "small"])
def test_every_pair_of_values_occurs(values: Mapping[str, Sequence[Any]]) -> None:
    """In about as few combinations as there can be: those of the two longest lists are all needed."""
    found = all_pairs(values)
    for one, other in combinations(values, 2):
        wanted = {(left, right) for left in values[one] for right in values[other]}
        assert {(combined[one], combined[other]) for combined in found} == wanted
    least = len(values["group"]) * len(values["block_size"])
    assert least <= len(found) <= 1.3 * least
    assert all_pairs(values) == found


@pytest.mark.parametrize("subject", backends.parameters([*backends.NATIVE, "triton-gpu"]), indirect=True)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_pair(subject: Subject, case: Case) -> None:
    check(subject.backend, case, subject.device)


@pytest.mark.parametrize("subject", backends.parameters(["triton-interpreted"]), indirect=True)
@pytest.mark.parametrize("case", SMALL_CASES, ids=name_of)
def test_every_pair_in_the_interpreter(subject: Subject, case: Case) -> None:
    check(subject.backend, case, subject.device)
