"""Random programs for the fuzzer: all that a decoder's step may have, recorded, beside the same operations one by one.

Knows a case's step, the small operations and programs; not processes or seconds. The numbers have to be alike bit for bit, in
the pools too: what is compared with a truth outside are the operations, by their own tests.
"""

import ctypes
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.cpu.operations import Operations, PackedWeight, pack
from kernels.cpu.program import Program
from kernels.interface import AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from tests.kernels import sanitized
from tests.kernels.cases import Case, poisoned, rows_of, step_of, tables_of, threads, write_past

#: Multiplications of a product, at most: so many that a trial takes some tens of milliseconds, without sanitizers.
_MOST_PRODUCTS: Final = 2_000_000


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, and how it attends. Norms of heads are left out in some, as models do."""

    shape: LayerShape
    q_heads: int
    rule: AttentionRule
    norms: tuple[Tensor, Tensor]  # [hidden]
    qkv: PackedWeight
    bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # [key_size], of queries and of keys
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight

    @property
    def widths(self) -> tuple[int, int, int]:
        """Elements of a row's queries, keys and values."""
        keys, values = self.shape.kv_heads * self.shape.key_size, self.shape.kv_heads * self.shape.value_size
        return self.q_heads * self.shape.key_size, keys, values


class RandomDecoder:
    """Layers of a case's shapes with random weights, and one step's input; a case in float16 is taken in bfloat16."""

    def __init__(self, case: Case) -> None:
        self.case = case if case.dtype != torch.float16 else replace(case, dtype=torch.bfloat16)
        self.step = step_of(self.case)
        self._dice = random.Random(case.seed)
        self._source = torch.Generator().manual_seed(case.seed)
        self.rows = sum(sequence.rows for sequence in self.step.sequences)
        widest = max(
            layer.kv_heads * (case.group * max(layer.key_size, layer.value_size) + layer.key_size + layer.value_size)
            for layer in case.layers
        )
        self.hidden = max(1, min(self._dice.randint(1, 150), _MOST_PRODUCTS // (widest * self.rows)))
        self.pairs = self._dice.randint(0, min(layer.key_size for layer in case.layers) // 2)
        self.layers = [self._layer(shape, data.rule) for shape, data in zip(self.case.layers, self.step.layers, strict=True)]
        self.head = self._weight(self._dice.randint(1, 100), self.hidden)
        self.input = self._random(self.rows, self.hidden)
        angles = 7 * torch.rand(self.rows, self.pairs, generator=self._source)
        self.cosines, self.sines = angles.cos().to(self.case.dtype), angles.sin().to(self.case.dtype)

    def compute(self, backend: CpuBackend, pool: KvCache, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Return the last norm and the head's product of it, by operations."""
        do, prepared = Operations(backend.instructions), backend.prepare(pool, rows)
        residual = self.input
        normed = do.rms_norm(residual, self.layers[0].norms[0], 1e-5)
        for number, layer in enumerate(self.layers):
            size = layer.shape.key_size
            parts = do.linear(normed, layer.qkv, layer.bias).split_with_sizes(layer.widths, dim=1)
            queries, keys, values = (
                part.reshape(self.rows, -1, each) for part, each in zip(parts, (size, size, layer.shape.value_size), strict=True)
            )
            if layer.head_norms is not None:
                queries, keys = (
                    do.rms_norm(heads.reshape(-1, size), norm, 1e-6).view(heads.shape)
                    for heads, norm in zip((queries, keys), layer.head_norms, strict=True)
                )
            turned = do.rotate_write(prepared, number, queries, keys, values, self.cosines, self.sines)
            attended = backend.paged_attention(prepared, number, turned, layer.rule).flatten(1)
            normed, residual = do.add_rms_norm(do.linear(attended, layer.out), residual, layer.norms[1], 1e-5)
            added = do.linear(do.silu_mul(do.linear(normed, layer.gate_up)), layer.down)
            normed, residual = do.add_rms_norm(added, residual, layer.norms[0], 1e-5)
        return normed, do.linear(normed, self.head)

    def run(self, backend: CpuBackend, pool: KvCache, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Return the same by a program, the head's product of float32; what lies behind the step's rows is NaN, and stays."""
        most = self.rows + self._dice.choice((0, 0, 3))  # where there are no more, an access behind them is one out of bounds
        told = ctypes.c_int32(0)
        program = Program(backend, pool, most, told)
        residual, normed, added = (program.buffer(self.hidden) for _ in range(3))
        cosines, sines = program.buffer(self.pairs), program.buffer(self.pairs)
        program.norm(residual, self.layers[0].norms[0], 1e-5, normed)
        for number, layer in enumerate(self.layers):
            program.at_layer(number + 1)
            shape, (q, k, _) = layer.shape, layer.widths
            joined, turned = program.buffer(layer.qkv.outputs), program.buffer(q)
            program.linear(normed, layer.qkv, layer.bias, joined)
            queries = joined[:, :q].view(most, -1, shape.key_size)
            keys = joined[:, q : q + k].view(most, -1, shape.key_size)
            values = joined[:, q + k :].view(most, -1, shape.value_size)
            if layer.head_norms is not None:
                q_normed, k_normed = program.buffer(q), program.buffer(k)
                program.norm(queries, layer.head_norms[0], 1e-6, q_normed)
                program.norm(keys, layer.head_norms[1], 1e-6, k_normed)
                queries, keys = (normed_heads.view(most, -1, shape.key_size) for normed_heads in (q_normed, k_normed))
            program.rotate_write(number, queries, keys, values, cosines, sines, turned)
            attended = program.buffer(layer.out.inner)
            program.attend(number, turned.view(most, -1, shape.key_size), layer.rule, attended)
            program.linear(attended, layer.out, None, added)
            program.add_norm(added, residual, layer.norms[1], 1e-5, normed)
            gates, gated = program.buffer(layer.gate_up.outputs), program.buffer(layer.down.inner)
            program.linear(normed, layer.gate_up, None, gates)
            program.silu_mul(gates, gated)
            program.linear(gated, layer.down, None, added)
            program.add_norm(added, residual, layer.norms[0], 1e-5, normed)
        wide = program.buffer(self.head.outputs, torch.float32)
        program.linear(normed, self.head, None, wide)
        for buffer, given in ((residual, self.input), (cosines, self.cosines), (sines, self.sines)):
            buffer.fill_(math.nan)
            buffer[: self.rows] = given
        wide.fill_(math.nan)
        program.run(self.rows, backend.prepare(pool, rows))
        assert told.value == len(self.layers)
        assert wide[self.rows :].isnan().all(), "rows behind the step's were written"
        return normed[: self.rows], wide[: self.rows]

    def _layer(self, shape: LayerShape, rule: AttentionRule) -> _Layer:
        q_heads, gated = shape.kv_heads * self.case.group, self._dice.randint(1, 300)
        outputs = q_heads * shape.key_size + shape.kv_heads * (shape.key_size + shape.value_size)
        return _Layer(
            shape=shape,
            q_heads=q_heads,
            rule=rule,
            norms=(self._random(self.hidden), self._random(self.hidden)),
            qkv=self._weight(outputs, self.hidden),
            bias=self._random(outputs) if self._dice.random() < 0.5 else None,
            head_norms=(self._random(shape.key_size), self._random(shape.key_size)) if self._dice.random() < 0.7 else None,
            out=self._weight(self.hidden, q_heads * shape.value_size),
            gate_up=self._weight(2 * gated, self.hidden),
            down=self._weight(self.hidden, gated),
        )

    def _weight(self, outputs: int, inner: int) -> PackedWeight:
        return pack((torch.randn(outputs, inner, generator=self._source) * inner**-0.5).to(self.case.dtype))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._source).to(self.case.dtype)


def program_once(backend: CpuBackend, case: Case, *, forbid: bool) -> None:
    """Compare a program with its operations, each with a pool of its own; `forbid` as in the fuzzer's other trials."""
    decoder = RandomDecoder(case)
    step, own = decoder.step, decoder.case
    tables = tables_of([-(-sequence.context // own.block_size) for sequence in step.sequences], own.scatter, own.seed)
    spare, results, pools = 0 if forbid else 1, [], []
    for compute in decoder.compute, decoder.run:
        pool = poisoned(backend, CacheShape(own.layers, own.block_size, own.dtype), tables)
        rows = rows_of(step.sequences, tables, own.block_size, pool.scratch, spare=spare)
        with sanitized.forbidden(pool, tables) if forbid else nullcontext(), threads(own.threads):
            write_past(backend, pool, step, tables, spare)
            results.append(compute(backend, pool, rows))
        pools.append(pool.frames.nan_to_num(-7.0))
    (normed, product), (its_normed, wide) = results
    assert normed.isfinite().all(), f"no numbers in {own}"
    assert torch.equal(normed, its_normed), f"a program differs from its operations in {own}"
    assert torch.equal(product, wide.to(own.dtype)), f"a wide product, rounded, is another one in {own}"
    assert torch.equal(*pools), f"a program writes something else into a pool in {own}"
