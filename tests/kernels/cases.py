"""Steps to try a backend with: from a few words to tensors, through a backend, beside the oracle.

Knows the interface and the oracle; not which backends there are. All random numbers come from a case's seed and are made on the
CPU, so that every backend on every device gets the same ones.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from kernels.interface import AttentionBackend, AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from tests.kernels.attention_oracle import LIMITS, Floats, attend, error

#: In which order a sequence's blocks lie in the pool: one behind the other, in no order, in no order with gaps.
Scatter = Literal["ordered", "shuffled", "sparse"]

#: How Q, K and V are handed over: by themselves; as parts of one tensor, [rows, all heads * size]; heads outside of rows; with
#: NaN between elements.
Strides = Literal["contiguous", "joined", "transposed", "spread"]

#: The first blocks of a pool belong to nobody, and where it is sparse as many again as are used.
_UNUSED: Final = 2


@dataclass(frozen=True)
class Sequence:
    """`rows` tokens to compute behind `past` ones."""

    past: int
    rows: int

    @property
    def context(self) -> int:
        return self.past + self.rows


@dataclass(frozen=True)
class Case:
    """A step over some sequences."""

    sequences: tuple[Sequence, ...]
    layers: tuple[LayerShape, ...]
    group: int = 1  # query heads for each KV head
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None  # None: one over the root of the key's size
    scatter: Scatter = "sparse"
    strides: Strides = "transposed"
    threads: int = 1  # of a backend on the CPU
    seed: int = 0


@dataclass(frozen=True)
class LayerData:
    """K and V of each sequence, the rows' Q in the order of the step, and what they come to."""

    keys: tuple[Tensor, ...]  # [context, kv_heads, key_size] each
    values: tuple[Tensor, ...]
    queries: Tensor
    rule: AttentionRule
    expected: Floats


@dataclass(frozen=True)
class Step:
    """What a case comes to, the same for every backend and every order of blocks."""

    case: Case
    sequences: tuple[Sequence, ...]  # decodes first
    layers: tuple[LayerData, ...]


# ------------------------------------------------------------------------------------------------------- from case to step


@lru_cache(maxsize=2)
def step_of(case: Case) -> Step:
    """Draw everything that a step computes with, and what the oracle makes of it.

    Backends take turns at one case, so the last is kept.
    """
    generator = torch.Generator().manual_seed(case.seed)
    sequences = tuple(sorted(case.sequences, key=lambda sequence: sequence.rows > 1))
    return Step(case, sequences, tuple(_layer_data(case, sequences, layer, generator) for layer in case.layers))


def _layer_data(case: Case, sequences: tuple[Sequence, ...], layer: LayerShape, generator: torch.Generator) -> LayerData:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    q_heads = layer.kv_heads * case.group
    keys = tuple(random(sequence.context, layer.kv_heads, layer.key_size) for sequence in sequences)
    values = tuple(random(sequence.context, layer.kv_heads, layer.value_size) for sequence in sequences)
    queries = random(sum(sequence.rows for sequence in sequences), q_heads, layer.key_size)
    rule = AttentionRule(
        scale=layer.key_size**-0.5 if case.scale is None else case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=random(q_heads) if case.sinks else None,
    )
    expected = [
        attend(float64(part), float64(key), float64(value), rule)
        for part, key, value in zip(
            queries.split_with_sizes([sequence.rows for sequence in sequences]), keys, values, strict=True
        )
    ]
    return LayerData(keys, values, queries, rule, np.concatenate(expected))


def float64(tensor: Tensor) -> Floats:
    found: Floats = tensor.double().numpy()
    return found


# ---------------------------------------------------------------------------------------------------- from step to results


def check(backend: AttentionBackend[Any], case: Case, device: str = "cpu") -> None:
    """Compare a backend with the oracle, layer by layer."""
    step = step_of(case)
    for layer, found in zip(step.layers, outputs(backend, step, case.scatter, device), strict=True):
        assert found.dtype == case.dtype
        assert found.is_contiguous()
        assert error(found, layer.expected) <= LIMITS[case.dtype]


def outputs(backend: AttentionBackend[Any], step: Step, scatter: Scatter, device: str = "cpu") -> list[Tensor]:
    """Return each layer's result, in a pool that was full of NaN: what was not written must not reach an output."""
    case = step.case
    tables = tables_of([-(-sequence.context // case.block_size) for sequence in step.sequences], scatter, case.seed)
    cache = poisoned(backend, CacheShape(case.layers, case.block_size, case.dtype), tables, device)
    return computed(backend, step, cache, tables)


def computed(backend: AttentionBackend[Any], step: Step, cache: KvCache, tables: list[list[int]], spare: int = 1) -> list[Tensor]:
    """Return each layer's result; the tables are handed over with `spare` entries more than the longest needs."""
    case, device = step.case, str(cache.frames.device)
    with threads(case.threads):
        write_past(backend, cache, step, tables, spare)
        rows = rows_of(step.sequences, tables, case.block_size, cache.scratch, device, spare)
        prepared = backend.prepare(cache, rows)
        found = []
        for number, layer in enumerate(step.layers):
            keys, values = (
                torch.cat([state[sequence.past :] for sequence, state in zip(step.sequences, states, strict=True)])
                for states in (layer.keys, layer.values)
            )
            queries, keys, values = laid_out((layer.queries, keys, values), case.strides, device)
            backend.write_kv(prepared, number, keys, values)
            sinks = None if layer.rule.sinks is None else layer.rule.sinks.to(device)
            found.append(backend.paged_attention(prepared, number, queries, replace(layer.rule, sinks=sinks)))
        return found


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch, and whoever asks it, work with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_past(backend: AttentionBackend[Any], cache: KvCache, step: Step, tables: list[list[int]], spare: int) -> None:
    """Write what earlier steps would have left, all of it at once."""
    members = [number for number, sequence in enumerate(step.sequences) if sequence.past]
    if not members:
        return
    members.sort(key=lambda number: step.sequences[number].past > 1)  # decodes first
    rows = rows_of(
        [Sequence(0, step.sequences[number].past) for number in members],
        [tables[number] for number in members],
        cache.shape.block_size,
        cache.scratch,
        str(cache.frames.device),
        spare,
    )
    prepared = backend.prepare(cache, rows)
    for number, layer in enumerate(step.layers):
        keys, values = (
            torch.cat([states[member][: step.sequences[member].past] for member in members]).to(cache.frames.device)
            for states in (layer.keys, layer.values)
        )
        backend.write_kv(prepared, number, keys, values)


def poisoned(backend: AttentionBackend[Any], shape: CacheShape, tables: list[list[int]], device: str = "cpu") -> KvCache:
    """Return a pool that has the tables' blocks and is full of NaN, its scratch block too."""
    blocks = max(block for table in tables for block in table) + 1 + _UNUSED
    return KvCache(shape, torch.full((blocks + 1, backend.layout(shape).elements), math.nan, dtype=shape.dtype, device=device))


def tables_of(lengths: list[int], scatter: Scatter, seed: int) -> list[list[int]]:
    """Return a table of each length."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    if scatter == "ordered":
        order = list(range(total))
    else:
        order = torch.randperm(total if scatter == "shuffled" else 2 * total, generator=generator)[:total].tolist()
    blocks = iter(order)
    return [[next(blocks) + _UNUSED for _ in range(length)] for length in lengths]


def rows_of(
    sequences: Iterable[Sequence],
    tables: list[list[int]],
    block_size: int,
    scratch: int,
    device: str = "cpu",
    spare: int = 1,
) -> StepRows:
    """Return the step's rows; tables are padded with the scratch block, `spare` entries more than the longest needs."""
    sequences = tuple(sequences)
    width = max(len(table) for table in tables) + spare
    slots = [
        table[position // block_size] * block_size + position % block_size
        for sequence, table in zip(sequences, tables, strict=True)
        for position in range(sequence.past, sequence.context)
    ]
    return StepRows(
        decodes=sum(sequence.rows == 1 for sequence in sequences),
        query_lengths=tuple(sequence.rows for sequence in sequences),
        context_lengths=tuple(sequence.context for sequence in sequences),
        tables=torch.tensor([table + [scratch] * (width - len(table)) for table in tables], dtype=torch.int32, device=device),
        write_slots=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def laid_out(tensors: tuple[Tensor, Tensor, Tensor], strides: Strides, device: str = "cpu") -> list[Tensor]:
    """Return the same values, [rows, heads, size] each, with other strides."""
    if strides == "joined":
        joined = torch.cat([tensor.flatten(1) for tensor in tensors], dim=1).to(device)
        parts = joined.split_with_sizes([tensor[0].numel() for tensor in tensors], dim=1)
        return [part.view(-1, *tensor.shape[1:]) for part, tensor in zip(parts, tensors, strict=True)]
    moved = [tensor.to(device) for tensor in tensors]
    if strides == "transposed":
        return [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in moved]
    if strides == "spread":
        return [torch.stack((tensor, torch.full_like(tensor, math.nan)), dim=-1)[..., 0] for tensor in moved]
    return moved
