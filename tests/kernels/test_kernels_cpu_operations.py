"""The CPU's small operations, on every instruction set of this machine, against float64 and transformers' own modules."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.operations import FEW_ROWS, Operations, pack
from kernels.interface import CacheShape, KvCache, LayerShape, StepRows
from tests.kernels.backends import need_cpu_library

MISSING: Final = library.why_missing()
INSTRUCTIONS: Final = () if MISSING else library.instructions()
DTYPES: Final = (torch.float32, torch.bfloat16)

#: Half a step between neighbours, relative: what one rounding may be off.
ROUNDING: Final = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}

#: What float32 sums may be off, relative to the sum of magnitudes. dpbf16 adds two products at once, each rounded.
ADDING: Final = 1e-5


@pytest.fixture(autouse=True)
def library_is_there() -> None:
    need_cpu_library()


examples = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=INSTRUCTIONS)
def operations(request: pytest.FixtureRequest) -> Operations:
    return Operations(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def spaced(values: Tensor, gap: int, offset: int) -> Tensor:
    """Return the same rows at an odd address, `gap` elements apart, with NaN in between: reading more spoils results."""
    count, size = values.shape
    memory = torch.full((offset + count * (size + gap) + 64,), torch.nan, dtype=values.dtype)
    view = memory.as_strided((count, size), (size + gap, 1), offset)
    view.copy_(values)
    return view


def steps_apart(left: Tensor, right: Tensor) -> int:
    """Return how many bfloat16 numbers lie between two, at most over all elements, plus one; 0: equal bits but for zeros."""
    bits = [value.view(torch.int16).int() for value in (left, right)]
    ordered = [torch.where(value < 0, -(value & 0x7FFF), value) for value in bits]
    return int((ordered[0] - ordered[1]).abs().max()) if left.numel() else 0


# -------------------------------------------------------------------------------------------------------------- linear


@examples
@given(
    rows=st.integers(0, 3 * FEW_ROWS),
    outputs=st.integers(0, 50),
    inner=st.integers(0, 140),
    gap=st.integers(0, 3),
    offset=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_the_one_in_float64(
    operations: Operations,
    rows: int,
    outputs: int,
    inner: int,
    gap: int,
    offset: int,
    dtype: torch.dtype,
    biased: bool,
    seed: int,
) -> None:
    source = torch.Generator().manual_seed(seed)
    left = spaced(torch.randn(rows, inner, generator=source).to(dtype), gap, offset)
    weight = spaced(torch.randn(outputs, inner, generator=source).to(dtype), gap, offset)
    bias = torch.randn(outputs, generator=source).to(dtype) if biased else None
    found = operations.linear(left, pack(weight), bias)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, outputs), dtype, True)
    expected = left.double() @ weight.double().T
    size = left.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    assert ((found.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + ADDING * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inner"), [(576, 576), (100, 1000), (1, 4096), (4096, 33)])
def test_a_row_has_the_same_product_alone_and_in_company_on_any_threads(
    operations: Operations, two_threads: None, dtype: torch.dtype, outputs: int, inner: int
) -> None:
    source = torch.Generator().manual_seed(inner)
    left = torch.randn(FEW_ROWS, inner, generator=source).to(dtype)
    weight = torch.randn(outputs, inner, generator=source).to(dtype)
    whole = operations.linear(left, pack(weight))
    for count in range(1, FEW_ROWS):
        assert torch.equal(operations.linear(left[-count:], pack(weight)), whole[-count:])
    torch.set_num_threads(1)
    assert torch.equal(operations.linear(left, pack(weight)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 31, 32, 44])
def test_what_is_no_number_stays_in_its_row(operations: Operations, dtype: torch.dtype, strange: float, at: int) -> None:
    left = torch.ones(3, 45, dtype=dtype)
    left[1, at] = strange
    weight = torch.full((20, 45), 0.5, dtype=dtype)
    found = operations.linear(left, pack(weight))
    assert torch.equal(found[[0, 2]], torch.full((2, 20), 22.5, dtype=dtype))
    assert torch.equal(found[1], torch.full((20,), strange, dtype=dtype)) or (strange != strange and found[1].isnan().all())
    weight[7, at] = 0.0  # infinity times nothing
    assert operations.linear(left, pack(weight))[1, 7].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inner"), [(32, 8), (33, 7), (1, 1), (5, 64)])
def test_a_packed_weight_gives_its_rows_back(dtype: torch.dtype, outputs: int, inner: int) -> None:
    weight = torch.randn(outputs, inner).to(dtype)
    numbers = torch.randint(0, outputs, (9,))
    for laid_out in weight, weight.T.contiguous().T:
        packed = pack(laid_out)
        assert torch.equal(packed.rows(numbers), weight[numbers])
        assert packed.blocks.shape == (-(-outputs // 32), -(-inner // 2), 64)


# --------------------------------------------------------------------------------------------------------------- norms


def module(size: int, weight: Tensor, epsilon: float) -> Callable[[Tensor], Tensor]:
    built = LlamaRMSNorm(size, epsilon)
    built.weight = torch.nn.Parameter(weight, requires_grad=False)
    called: Callable[[Tensor], Tensor] = built
    return called


@examples
@given(
    rows=st.integers(0, 5),
    size=st.integers(1, 200),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_a_norm_is_that_of_the_module(
    operations: Operations, rows: int, size: int, gap: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    left = spaced((scale * torch.randn(rows, size, generator=source)).to(dtype), gap, gap)
    weight = torch.randn(size, generator=source).to(dtype)
    found = operations.rms_norm(left, weight, 1e-5)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, size), dtype, True)
    torch.testing.assert_close(found, module(size, weight, 1e-5)(left), rtol=4 * ROUNDING[dtype] + 1e-6, atol=1e-37)
    exact = weight.double() * left.double() / (left.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(found.double(), exact, rtol=2.1 * ROUNDING[dtype] + 1e-6, atol=1e-37)


def test_norms_in_bfloat16_are_bit_for_bit_those_of_the_module_nearly_everywhere(operations: Operations) -> None:
    source = torch.Generator().manual_seed(0)
    left = torch.randn(500, 576, generator=source).bfloat16()
    weight = torch.randn(576, generator=source).bfloat16()
    found, expected = operations.rms_norm(left, weight, 1e-5), module(576, weight, 1e-5)(left)
    assert steps_apart(found, expected) <= 2  # one before the weight can be two behind it
    assert (found != expected).float().mean() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 1), (3, 577), (40, 576)])
def test_the_norm_of_a_sum_is_the_norm_of_the_rounded_sum(
    operations: Operations, two_threads: None, dtype: torch.dtype, rows: int, size: int
) -> None:
    source = torch.Generator().manual_seed(size)
    left, residual = (spaced(torch.randn(rows, size, generator=source).to(dtype), 3, at) for at in (1, 2))
    weight = torch.randn(size, generator=source).to(dtype)
    found, total = operations.add_rms_norm(left, residual, weight, 1e-6)
    assert torch.equal(total, left + residual)
    assert torch.equal(found, operations.rms_norm(total, weight, 1e-6))
    torch.set_num_threads(1)
    assert torch.equal(found, operations.add_rms_norm(left, residual, weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_what_is_no_number_or_nothing(operations: Operations, dtype: torch.dtype) -> None:
    left = torch.ones(4, 40, dtype=dtype)
    left[0, 39], left[1, 3], left[2] = torch.nan, torch.inf, 0.0
    weight = torch.ones(40, dtype=dtype)
    found, expected = operations.rms_norm(left, weight, 1e-5), module(40, weight, 1e-5)(left)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0].isnan().all()
    assert torch.equal(found[2], torch.zeros(40, dtype=dtype))


# ---------------------------------------------------------------------------------------------------------------- gate


def test_every_bfloat16_has_torchs_silu(operations: Operations) -> None:
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)[:, None]
    found = operations.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    expected = functional.silu(gate)
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    tiny = expected.abs() < 2.0**-100  # e^x of these is below all normal numbers, or close to that
    assert steps_apart(found[number & ~tiny], expected[number & ~tiny]) <= 1
    assert found[number & tiny].abs().max() <= 2.0**-99


@examples
@given(
    rows=st.integers(0, 4),
    size=st.integers(0, 600),
    gap=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_a_gate_is_that_of_torch(operations: Operations, rows: int, size: int, gap: int, dtype: torch.dtype, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    left = spaced((5 * torch.randn(rows, 2 * size, generator=source)).to(dtype), gap, gap)
    found = operations.silu_mul(left)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, size), dtype, True)
    gate, up = left[:, :size], left[:, size:]
    torch.testing.assert_close(found, functional.silu(gate) * up, rtol=2 * ROUNDING[dtype] + 5e-6, atol=1e-37)


def test_a_gate_on_two_threads_is_that_on_one(operations: Operations, two_threads: None) -> None:
    left = torch.randn(30, 2 * 1111, generator=torch.Generator().manual_seed(0))
    found = operations.silu_mul(left)
    torch.set_num_threads(1)
    assert torch.equal(operations.silu_mul(left), found)


# --------------------------------------------------------------------------------------------------------------- peaks


@examples
@given(
    rows=st.integers(0, 5),
    size=st.one_of(st.integers(1, 70), st.integers(1000, 3100)),
    gap=st.integers(0, 3),
    levels=st.integers(1, 40),
    special=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3099), st.sampled_from([torch.inf, -torch.inf, torch.nan]))),
    seed=st.integers(0, 2**16),
)
def test_peaks_are_the_largest_elements_and_the_first_of_them(
    operations: Operations, rows: int, size: int, gap: int, levels: int, special: list[tuple[int, int, float]], seed: int
) -> None:
    # Few different values, so that the largest one is there more than once.
    values = torch.randint(-levels, levels, (rows, size), generator=torch.Generator().manual_seed(seed)).float()
    for row, column, value in special:
        if row < rows and column < size:
            values[row, column] = value
    maxima, indexes = operations.peaks(spaced(values, gap, gap))
    assert (maxima.dtype, indexes.dtype) == (torch.float32, torch.int64)
    for row, found, index in zip(values.tolist(), maxima.tolist(), indexes.tolist(), strict=True):
        if any(math.isnan(value) for value in row):
            assert math.isnan(found)
        else:
            assert (found, index) == (max(row), row.index(max(row)))


def test_peaks_of_rows_without_any_number_are_minus_infinity(operations: Operations) -> None:
    maxima, indexes = operations.peaks(torch.full((2, 1500), -torch.inf))
    assert maxima.tolist() == [-torch.inf] * 2
    assert indexes.tolist() == [0, 0]


def test_peaks_on_two_threads_are_those_on_one(operations: Operations, two_threads: None) -> None:
    rows = torch.randn(31, 5000, generator=torch.Generator().manual_seed(0))
    found = operations.peaks(rows)
    torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(operations.peaks(rows), found, strict=True))


# -------------------------------------------------------------------------------------------------------------- rotary


@dataclass(frozen=True)
class Step:
    """One step's rows in a pool full of NaN."""

    backend: CpuBackend
    cache: KvCache
    rows: StepRows


def step(instructions: str, shape: CacheShape, tokens: Sequence[int], source: torch.Generator) -> Step:
    """Return a prefill of so many tokens for each sequence, its blocks anywhere."""
    backend = CpuBackend(instructions)
    widths = [-(-count // shape.block_size) for count in tokens]
    blocks = sum(widths)
    frames = torch.full((blocks + 1, backend.layout(shape).elements), torch.nan, dtype=shape.dtype)
    order = torch.randperm(blocks, generator=source).tolist()
    tables = torch.full((len(tokens), max(widths)), blocks, dtype=torch.int32)
    slots = []
    for sequence, (count, width) in enumerate(zip(tokens, widths, strict=True)):
        own = [order.pop() for _ in range(width)]
        tables[sequence, :width] = torch.tensor(own)
        slots += [own[at // shape.block_size] * shape.block_size + at % shape.block_size for at in range(count)]
    rows = StepRows(0, tuple(tokens), tuple(tokens), tables, torch.tensor(slots))
    return Step(backend, KvCache(shape, frames), rows)


def turned(states: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """Turn as transformers does, in the states' own dtype: apply_rotary_pos_emb of llama, or of cohere if interleaved."""
    rotary = 2 * cosines.shape[1]
    if interleaved:
        angles = [angle.repeat_interleave(2, dim=1)[:, None] for angle in (cosines, sines)]
        other = torch.stack((-states[..., 1:rotary:2], states[..., 0:rotary:2]), dim=-1).flatten(-2)
    else:
        angles = [torch.cat((angle, angle), dim=1)[:, None] for angle in (cosines, sines)]
        other = torch.cat((-states[..., rotary // 2 : rotary], states[..., : rotary // 2]), dim=-1)
    front = states[..., :rotary] * angles[0] + other * angles[1]
    return torch.cat((front, states[..., rotary:]), dim=-1)


@settings(examples, max_examples=60)
@given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 6, 16, 24, 32]),
    heads=st.sampled_from([(9, 3), (4, 4), (7, 1)]),
    sizes=st.sampled_from([(64, 64), (80, 80), (33, 16), (192, 128)]),
    part=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    dtype=st.sampled_from([*DTYPES, torch.float16]),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_rotary_embedding_is_that_of_transformers_and_what_is_written_is_what_write_kv_writes(
    operations: Operations,
    two_threads: None,
    tokens: list[int],
    block_size: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    part: float,
    dtype: torch.dtype,
    interleaved: bool,
    seed: int,
) -> None:
    source = torch.Generator().manual_seed(seed)
    (q_heads, kv_heads), (key_size, value_size) = heads, sizes
    shape = CacheShape((LayerShape(1, 16, 16), LayerShape(kv_heads, key_size, value_size)), block_size, dtype)
    here = step(operations.instructions, shape, tokens, source)
    count, pairs = sum(tokens), int(part * key_size) // 2
    joined = torch.randn(count, (q_heads + kv_heads) * key_size + kv_heads * value_size, generator=source).to(dtype)
    queries, keys, values = torch.split(joined, [q_heads * key_size, kv_heads * key_size, kv_heads * value_size], dim=1)
    queries, keys = queries.view(count, q_heads, key_size), keys.view(count, kv_heads, key_size)
    values = values.view(count, kv_heads, value_size)
    angles = 7 * torch.rand(count, pairs, generator=source)
    cosines, sines = (spaced(angle.to(dtype), 5, 3) for angle in (angles.cos(), angles.sin()))

    prepared = here.backend.prepare(here.cache, here.rows)
    found = operations.rotate_write(prepared, 1, queries, keys, values, cosines, sines, interleaved=interleaved)
    assert torch.equal(found, turned(queries, cosines, sines, interleaved))

    expected = KvCache(shape, torch.full_like(here.cache.frames, torch.nan))
    here.backend.write_kv(here.backend.prepare(expected, here.rows), 1, turned(keys, cosines, sines, interleaved), values)
    assert torch.equal(here.cache.frames.isnan(), expected.frames.isnan())
    assert torch.equal(here.cache.frames.nan_to_num(), expected.frames.nan_to_num())


def test_the_model_turns_as_this_test_does() -> None:
    source = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(5, heads, 64, generator=source).bfloat16() for heads in (9, 3))
    angles = torch.rand(5, 32, generator=source)
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()
    twice = [torch.cat((angle, angle), dim=1)[None] for angle in (cosines, sines)]
    expected = apply_rotary_pos_emb(queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], *twice)
    for states, theirs in zip((queries, keys), expected, strict=True):
        assert torch.equal(turned(states, cosines, sines, False), theirs[0].transpose(0, 1))


def test_angles_that_do_not_fit_are_refused() -> None:
    shape = CacheShape((LayerShape(2, 32, 32),), 16, torch.float32)
    operations = Operations()
    here = step(operations.instructions, shape, [3], torch.Generator().manual_seed(0))
    prepared = here.backend.prepare(here.cache, here.rows)
    states = torch.ones(3, 2, 32)
    for angles in torch.ones(2, 16), torch.ones(3, 17):
        with pytest.raises(ValueError, match="angles of"):
            operations.rotate_write(prepared, 0, states, states, states, angles, angles)
    angles = torch.ones(3, 16)
    with pytest.raises(ValueError, match=r"\[3, 2, 16\] is not \[3, 2, 32\]"):
        operations.rotate_write(prepared, 0, states, states[..., :16], states, angles, angles)
    with pytest.raises(TypeError, match=r"bfloat16 beside torch\.float32"):
        operations.rotate_write(prepared, 0, states.bfloat16(), states, states, angles, angles)
    with pytest.raises(ValueError, match="do not lie side by side"):
        operations.rotate_write(prepared, 0, torch.ones(3, 2, 64)[..., ::2], states, states, angles, angles)
    assert here.cache.frames.isnan().all()


# ------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda o: pack(torch.ones(3, 8).half()), TypeError, "bfloat16 or float32 is wanted"),
        (lambda o: pack(torch.ones(3, 8, device="meta")), TypeError, "lies on meta, not on the CPU"),
        (lambda o: pack(torch.ones(8)), ValueError, r"\[8\] is not \[outputs, inner\]"),
        (lambda o: o.linear(torch.ones(2, 8).half(), pack(torch.ones(3, 8))), TypeError, "bfloat16 or float32 is wanted"),
        (lambda o: o.linear(torch.ones(2, 8), pack(torch.ones(3, 8).bfloat16())), TypeError, "bfloat16 beside torch.float32"),
        (lambda o: o.linear(torch.ones(2, 8), pack(torch.ones(3, 9))), ValueError, r"a weight of \[3, 9\] for rows of 8"),
        (lambda o: o.linear(torch.ones(2, 8), pack(torch.ones(3, 8)), torch.ones(2)), ValueError, r"\[2\] is not \[3\]"),
        (lambda o: o.linear(torch.ones(8, 2).T, pack(torch.ones(3, 8))), ValueError, "do not lie side by side"),
        (lambda o: o.linear(torch.ones(8), pack(torch.ones(3, 8))), ValueError, r"\[8\] is not \[n, size\]"),
        (lambda o: o.rms_norm(torch.ones(2, 8), torch.ones(9), 1e-5), ValueError, r"\[9\] is not \[8\]"),
        (lambda o: o.rms_norm(torch.ones(2, 8), torch.ones(16)[::2], 1e-5), ValueError, "do not lie side by side"),
        (lambda o: o.rms_norm(torch.ones(2, 16)[:, ::2], torch.ones(8), 1e-5), ValueError, "do not lie side by side"),
        (lambda o: o.add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-5), ValueError, "a residual of"),
        (lambda o: o.silu_mul(torch.ones(2, 7)), ValueError, "rows of 7 are no gate and up"),
        (lambda o: o.peaks(torch.ones(2, 0)), ValueError, "rows of nothing"),
        (lambda o: o.peaks(torch.ones(2, 7, dtype=torch.bfloat16)), TypeError, "bfloat16 beside"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[Operations], object], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        call(Operations())


# ---------------------------------------------------------------------------------------------------------------- read


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 1000, 64 * 1024 + 13])
def test_a_read_reads_everything(operations: Operations, size: int, threads: int) -> None:
    memory = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)[3:]
    here = library.load()
    found = here.read(here.number(operations.instructions), memory.ctypes.data, size, threads)
    padded = np.concatenate((memory, np.zeros(-size % 8, dtype=np.uint8)))
    assert found == int(np.bitwise_xor.reduce(padded.view(np.uint64), initial=0))
