"""A recorded program gives the numbers of its operations bit for bit: every instruction set, any rows, one to three threads."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.operations import Operations, PackedWeight, pack
from kernels.cpu.program import Program
from kernels.interface import AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from tests.kernels.backends import need_cpu_library

INSTRUCTIONS: Final = () if library.why_missing() else library.instructions()
DTYPES: Final = (torch.float32, torch.bfloat16)
MOST_ROWS: Final = 40
BLOCK_SIZE: Final = 8
BLOCKS: Final = 30
HIDDEN: Final = 96
Q_HEADS, KV_HEADS, SIZE = 6, 2, 24
RULE: Final = AttentionRule(0.2, window=19, softcap=30.0, sinks=torch.linspace(-1, 1, Q_HEADS))


@pytest.fixture(autouse=True)
def library_is_there() -> None:
    need_cpu_library()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Layer:
    """Weights of one layer with all that there may be, and a pool for it; `record` and `compute` are the same twice."""

    def __init__(self, instructions: str, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        self.backend, self.operations = CpuBackend(instructions), Operations(instructions)
        self.dtype = dtype
        both = (Q_HEADS + 2 * KV_HEADS) * SIZE
        self.qkv, self.out = self.weight(both, HIDDEN), self.weight(HIDDEN, Q_HEADS * SIZE)
        self.gate_up, self.down = self.weight(2 * 130, HIDDEN), self.weight(HIDDEN, 130)
        self.bias = torch.randn(both, dtype=dtype)
        self.norms = [1 + torch.randn(HIDDEN).mul(0.1).to(dtype) for _ in range(3)]
        self.head_norm = 1 + torch.randn(SIZE).mul(0.1).to(dtype)
        shape = CacheShape((LayerShape(KV_HEADS, SIZE, SIZE),), BLOCK_SIZE, dtype)
        self.pools = [
            KvCache(shape, torch.full((BLOCKS + 1, self.backend.layout(shape).elements), torch.nan, dtype=dtype))
            for _ in range(2)
        ]

    def weight(self, outputs: int, inner: int) -> PackedWeight:
        return pack(torch.randn(outputs, inner).mul(inner**-0.5).to(self.dtype))

    def compute(self, hidden: Tensor, angles: tuple[Tensor, Tensor], rows: StepRows) -> Tensor:
        do, pool, count = self.operations, self.pools[0], hidden.shape[0]
        prepared = self.backend.prepare(pool, rows)
        qkv = do.linear(do.rms_norm(hidden, self.norms[0], 1e-5), self.qkv, self.bias).view(count, -1, SIZE)
        queries, keys = (
            do.rms_norm(heads.reshape(-1, SIZE), self.head_norm, 1e-6).view(count, -1, SIZE)
            for heads in (qkv[:, :Q_HEADS], qkv[:, Q_HEADS : Q_HEADS + KV_HEADS])
        )
        values = qkv[:, Q_HEADS + KV_HEADS :]
        turned = do.rotate_write(prepared, 0, queries, keys, values, angles[0], angles[1])
        attended = self.backend.paged_attention(prepared, 0, turned, RULE)
        normed, hidden = do.add_rms_norm(do.linear(attended.flatten(1), self.out), hidden, self.norms[1], 1e-5)
        added = do.linear(do.silu_mul(do.linear(normed, self.gate_up)), self.down)
        return do.add_rms_norm(added, hidden, self.norms[2], 1e-5)[0]

    def record(self, told: ctypes.c_int32) -> tuple[Program, Tensor, Tensor, Tensor, Tensor]:
        """Return the program, and its buffers: rows, cosines, sines, result."""
        program = Program(self.backend, self.pools[1], MOST_ROWS, told)
        hidden, normed, added = (program.buffer(HIDDEN) for _ in range(3))
        cosines, sines = program.buffer(SIZE // 2), program.buffer(SIZE // 2)
        both = program.buffer(self.qkv.outputs)
        queries, keys, turned = (program.buffer(heads * SIZE) for heads in (Q_HEADS, KV_HEADS, Q_HEADS))
        attended, gates, gated = program.buffer(Q_HEADS * SIZE), program.buffer(2 * 130), program.buffer(130)
        program.at_layer(1)
        program.norm(hidden, self.norms[0], 1e-5, normed)
        program.linear(normed, self.qkv, self.bias, both)
        heads = both.view(MOST_ROWS, -1, SIZE)
        program.norm(heads[:, :Q_HEADS], self.head_norm, 1e-6, queries)
        program.norm(heads[:, Q_HEADS : Q_HEADS + KV_HEADS], self.head_norm, 1e-6, keys)
        q, k = queries.view(MOST_ROWS, -1, SIZE), keys.view(MOST_ROWS, -1, SIZE)
        program.rotate_write(0, q, k, heads[:, Q_HEADS + KV_HEADS :], cosines, sines, turned)
        program.attend(0, turned.view(MOST_ROWS, -1, SIZE), RULE, attended)
        program.linear(attended, self.out, None, added)
        program.add_norm(added, hidden, self.norms[1], 1e-5, normed)
        program.at_layer(7)
        program.linear(normed, self.gate_up, None, gates)
        program.silu_mul(gates, gated)
        program.linear(gated, self.down, None, added)
        program.add_norm(added, hidden, self.norms[2], 1e-5, normed)
        return program, hidden, cosines, sines, normed


def steps() -> Iterator[StepRows]:
    """Yield the steps of three sequences: chunks, chunks beside decodes, decodes alone; tables in no order."""
    tables = torch.randperm(BLOCKS).view(3, -1).to(torch.int32)
    at = [0, 0, 0]
    for lengths in ((20, 7, 13), (1, 15, 1), (1, 1, 1), (24, 1, 1)):
        order = sorted(range(3), key=lambda one: lengths[one] > 1)
        slots = [
            tables[one, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for one in order
            for place in range(at[one], at[one] + lengths[one])
        ]
        at = [begun + length for begun, length in zip(at, lengths, strict=True)]
        yield StepRows(
            decodes=lengths.count(1),
            query_lengths=tuple(lengths[one] for one in order),
            context_lengths=tuple(at[one] for one in order),
            tables=tables[order],
            write_slots=torch.tensor(slots, dtype=torch.int64),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_program_gives_what_its_operations_give(instructions: str, dtype: torch.dtype, threads: int) -> None:
    layer, told = Layer(instructions, dtype), ctypes.c_int32(0)
    program, hidden, cosines, sines, result = layer.record(told)
    for rows in steps():
        count = rows.write_slots.shape[0]
        given = torch.randn(count, HIDDEN).to(dtype)
        angles = (torch.randn(count, SIZE // 2).cos().to(dtype), torch.randn(count, SIZE // 2).sin().to(dtype))
        expected = layer.compute(given, angles, rows)
        for buffer, values in ((hidden, given), (cosines, angles[0]), (sines, angles[1])):
            buffer.fill_(torch.nan)  # rows that are not of this step are not read
            buffer[:count] = values
        program.run(count, layer.backend.prepare(layer.pools[1], rows))
        assert torch.equal(result[:count], expected)
        assert told.value == 7
    first, second = (pool.frames.nan_to_num(-7.0) for pool in layer.pools)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wide_product_is_not_rounded(dtype: torch.dtype) -> None:
    backend = CpuBackend()
    pool = Layer(backend.instructions, dtype).pools[0]
    weight = torch.randn(50, 33).to(dtype)
    program = Program(backend, pool, 4, ctypes.c_int32(0))
    source, wide = program.buffer(33), program.buffer(50, torch.float32)
    program.linear(source, pack(weight), None, wide)
    source.copy_(torch.randn(4, 33))
    wide.fill_(torch.nan)
    program.run(3)
    exact = source[:3].double() @ weight.double().T
    assert (wide[:3] - exact).abs().max() < 1e-5 * (source[:3].double().abs() @ weight.double().abs().T).max()
    assert wide[3].isnan().all()


def test_what_does_not_fit_is_refused_when_it_is_recorded() -> None:
    layer = Layer(INSTRUCTIONS[-1], torch.bfloat16)
    program, hidden, *_ = layer.record(ctypes.c_int32(0))
    good = program.buffer(layer.qkv.outputs)
    refused: list[Callable[[], None]] = [
        lambda: program.linear(program.buffer(HIDDEN + 1), layer.qkv, None, good),
        lambda: program.linear(hidden[:7], layer.qkv, None, good),
        lambda: program.linear(program.buffer(MOST_ROWS).T, layer.qkv, None, good),
        lambda: program.linear(hidden, layer.qkv, layer.bias[1:], good),
        lambda: program.norm(hidden, layer.head_norm, 1e-5, good),
        lambda: program.add_norm(hidden, good, layer.norms[0], 1e-5, hidden),
        lambda: program.silu_mul(hidden, hidden),
        lambda: program.attend(0, good.view(MOST_ROWS, -1, 12), RULE, hidden),
    ]
    for record in refused:
        with pytest.raises(ValueError):
            record()
    with pytest.raises(TypeError):
        program.linear(hidden.float(), layer.qkv, None, good)
    with pytest.raises(TypeError):
        program.linear(hidden, pack(torch.randn(4, HIDDEN)), None, program.buffer(4))
    with pytest.raises(TypeError):
        Program(layer.backend, KvCache(CacheShape((), 1, torch.float16), torch.zeros(1, 0)), 1, ctypes.c_int32(0))


def test_rows_that_were_not_prepared_are_refused() -> None:
    layer = Layer(INSTRUCTIONS[-1], torch.float32)
    program = layer.record(ctypes.c_int32(0))[0]
    rows = next(steps())
    prepared = layer.backend.prepare(layer.pools[1], rows)
    for count, what in ((0, prepared), (MOST_ROWS + 1, prepared), (3, prepared), (3, None)):
        with pytest.raises(ValueError):
            program.run(count, what)
