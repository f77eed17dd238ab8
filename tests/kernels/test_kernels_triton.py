"""What is Triton's own: groups larger than a tile, splits and their joining, chunks found by bisection, words, runs, launches."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

from kernels.interface import AttentionRule, CacheShape, KvCache, LayerShape
from tests.kernels import backends
from tests.kernels.backends import Subject
from tests.kernels.cases import Case, Sequence, check, outputs, poisoned, rows_of, step_of, tables_of

REPOSITORY: Final = Path(__file__).parents[2]

on_triton = pytest.mark.parametrize("subject", backends.parameters(["triton-interpreted", "triton-gpu"]), indirect=True)
on_gpu = pytest.mark.parametrize("subject", backends.parameters(["triton-gpu"]), indirect=True)


def outside(code: str, **environment: str) -> str:
    """Run code in a process where Triton is not interpreted, and where there is no GPU; return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


# ------------------------------------------------------------------------------------------------------------- attention


@on_triton
@pytest.mark.parametrize(("group", "kv_heads"), [(20, 2), (33, 1), (71, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_larger_than_a_tile(subject: Subject, group: int, kv_heads: int, dtype: torch.dtype) -> None:
    sequences = (Sequence(20, 1), Sequence(0, 1), Sequence(3, 5))
    layer = LayerShape(kv_heads, 24, 16)
    check(subject.backend, Case(sequences, (layer,), group=group, dtype=dtype, sinks=True), subject.device)


@on_triton
@pytest.mark.parametrize("past", [126, 127, 128, 255, 383])
@pytest.mark.parametrize("window", [None, 130])
def test_splits_are_joined(subject: Subject, past: int, window: int | None) -> None:
    """A split has 128 tokens where there is so little to do; sinks take part once and not in each. Short ones have fewer."""
    sequences = (Sequence(past, 1), Sequence(4, 1), Sequence(200, 1))
    case = Case(sequences, (LayerShape(1, 16, 8),), group=3, block_size=16, window=window, softcap=4.0, sinks=True)
    check(subject.backend, case, subject.device)


@on_triton
@pytest.mark.parametrize("group", [1, 3, 7])
def test_every_tile_finds_its_chunk(subject: Subject, group: int) -> None:
    """Chunks shorter than a tile, longer, and as long; decodes before them."""
    lengths = (2, 64, 3, 128, 2, 2, 33, 5)
    sequences = (Sequence(7, 1), Sequence(0, 1), *(Sequence(number % 3, rows) for number, rows in enumerate(lengths)))
    check(subject.backend, Case(sequences, (LayerShape(1, 4, 4),), group=group, window=9), subject.device)


@on_triton
@pytest.mark.parametrize("size", [16, 128])
def test_rows_that_see_nothing_of_their_tiles_first_tokens(subject: Subject, size: int) -> None:
    """A window shorter than a tile, so that its last rows, and the padding behind them, begin further on."""
    case = Case((Sequence(3, 100),), (LayerShape(1, size, size),), window=5, dtype=torch.bfloat16, sinks=True)
    check(subject.backend, case, subject.device)


@on_triton
def test_blocks_larger_than_a_tile(subject: Subject) -> None:
    sequences = (Sequence(255, 1), Sequence(256, 1), Sequence(250, 12))
    check(subject.backend, Case(sequences, (LayerShape(2, 8, 8),), group=2, block_size=256), subject.device)


@on_triton
def test_a_large_cap_is_exact_near_zero(subject: Subject) -> None:
    """tanh of scores that are small beside the cap: a formula by exponentials alone would have lost their digits."""
    case = Case((Sequence(40, 1), Sequence(9, 6)), (LayerShape(1, 16, 16),), softcap=1000.0)
    check(subject.backend, case, subject.device)


@on_triton
def test_nothing_before_the_window_is_read(subject: Subject) -> None:
    """What went out of sight may be anywhere: its table entries lead to NaN, in the scratch block."""
    sequences = (Sequence(60, 1), Sequence(45, 10))
    case = Case(sequences, (LayerShape(1, 16, 16),), window=12, block_size=4)
    step = step_of(case)
    (expected,) = outputs(subject.backend, step, "ordered", subject.device)
    tables = tables_of([-(-one.context // 4) for one in sequences], "ordered", 0)
    cache = poisoned(subject.backend, CacheShape(case.layers, 4, case.dtype), tables, subject.device)
    (layer,) = step.layers
    for one, table, keys, values in zip(sequences, tables, layer.keys, layer.values, strict=True):
        first = one.past - 11 if one.rows == 1 else one.past + 1 - 12
        table[: first // 4] = [cache.scratch] * (first // 4)
        seen = rows_of([Sequence(first, one.context - first)], [table], 4, cache.scratch, subject.device)
        subject.backend.write_kv(
            subject.backend.prepare(cache, seen), 0, keys[first:].to(subject.device), values[first:].to(subject.device)
        )
    prepared = subject.backend.prepare(cache, rows_of(sequences, tables, 4, cache.scratch, subject.device))
    found = subject.backend.paged_attention(prepared, 0, layer.queries.to(subject.device), layer.rule)
    assert torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------------ frames and copies


@on_triton
@pytest.mark.parametrize(("elements", "word"), [(5, torch.int16), (6, torch.int32), (8, torch.int64), (5000, torch.int64)])
def test_frames_are_copied_in_words_that_fit(subject: Subject, elements: int, word: torch.dtype) -> None:
    from kernels.triton.launches import as_words

    frames = torch.randn(6, elements, device=subject.device).bfloat16()
    assert as_words(frames).dtype == word
    before = frames.clone()
    shape = CacheShape((LayerShape(1, elements, 0),), 1, torch.bfloat16)
    subject.backend.copy_blocks(KvCache(shape, frames), [(0, 4), (0, 2), (5, 1)])
    assert torch.equal(frames, before[[0, 5, 0, 3, 0, 5]])


@on_triton
def test_frames_are_swapped_in_runs(subject: Subject) -> None:
    from kernels.triton.backend import _runs

    moves = [(0, 3), (1, 4), (2, 5), (4, 1), (3, 2), (7, 6)]
    assert _runs(moves) == [(0, 3, 3), (4, 1, 1), (3, 2, 1), (7, 6, 1)]
    assert _runs([]) == []
    frames = torch.randn(8, 10, device=subject.device)
    host = torch.zeros(7, 10, pin_memory=subject.device == "cuda")
    subject.backend.swap_blocks(frames, host, moves)
    back = torch.zeros(8, 10, device=subject.device)
    subject.backend.swap_blocks(host, back, [(target, source) for source, target in moves])
    assert torch.equal(back[[0, 1, 2, 3, 4, 7]], frames[[0, 1, 2, 3, 4, 7]])
    assert torch.count_nonzero(back[[5, 6]]) == 0


@on_triton
def test_a_frame_is_as_large_as_its_tokens(subject: Subject) -> None:
    for size in (1, 5, 64, 80, 128):
        layout = subject.backend.layout(CacheShape((LayerShape(3, size, size + 1),) * 2, 16, torch.bfloat16))
        assert layout.elements == 2 * 3 * (2 * size + 1) * 16


# ------------------------------------------------------------------------------------------------------------- the choices


def test_splits_fill_the_chip_and_stay_within_their_limits() -> None:
    from kernels.triton.tiles import MAX_SPLITS, Chip, split_tokens

    chip = Chip(processors=100, shared=163 * 1024, from_shared=True)
    row_bytes = 32 * 130 * 4

    def split(*seen: int) -> int:
        return split_tokens(seen, 8, row_bytes, chip)

    assert split(1) == split(128) == 128
    assert split(8192) == 128  # one sequence: 64 splits of 8 heads are 512 programs
    assert split(*[2048] * 64) == 1024  # enough programs anyway
    assert split(*[16] * 31, 32768) == 512  # the long one alone has to fill the chip
    assert split(*[16] * 511, 32768) == 8192  # and that much room for all of them is too much
    for longest in (1, 1000, 10**5, 10**6, 2**31 - 1):
        for count in (1, 7, 500):
            tokens = split(*[longest] * count)
            assert tokens & (tokens - 1) == 0
            splits = -(-longest // tokens)
            assert splits <= MAX_SPLITS
            assert splits == 1 or splits * count * row_bytes <= 64 * 1024 * 1024


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [1, 5, 16, 24, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
def test_every_tile_is_one_that_products_take(itemsize: int, size: int, shared: int) -> None:
    from kernels.triton.tiles import Chip, decode_tile, padded, prefill_tile

    assert padded(size) >= max(16, size)
    tiles = [decode_tile(group, padded(size), itemsize) for group in (1, 16, 17, 64)]
    tiles.append(prefill_tile(padded(size), itemsize, Chip(100, shared, from_shared=shared > 99 * 1024)))
    for tile in tiles:
        for number in (tile.rows, tile.tokens):
            assert number >= 16
            assert number & (number - 1) == 0


# ------------------------------------------------------------------------------------------------- where it does not work


def test_without_a_gpu_it_says_so() -> None:
    """At once; and for a pool in the host's memory at its first use, where a GPU was found."""
    code = """
import torch
from kernels.interface import CacheShape, KvCache, LayerShape
from kernels.registry import BackendError, create

def tell(call):
    try:
        call()
    except BackendError as error:
        print(error)

tell(lambda: create("triton"))
torch.cuda.is_available = lambda: True
backend = create("triton")
cache = KvCache(CacheShape((LayerShape(1, 16, 16),), 16, torch.float32), torch.zeros(3, 512))
tell(lambda: backend.copy_blocks(cache, [(0, 1)]))
"""
    assert outside(code).splitlines() == [
        "the Triton kernels can't be used: torch finds no NVIDIA GPU; see nvidia-smi",
        "--attention triton: the cache is on cpu; Triton's kernels need an NVIDIA GPU",
    ]


def test_importing_the_folder_finds_the_real_triton() -> None:
    code = """
import sys, kernels.triton
print("triton" in sys.modules, "torch" in sys.modules)
import kernels.triton.storing, triton
print(kernels.triton.storing.triton is triton, "kernels" in triton.__file__)
"""
    assert outside(code).split() == ["False", "False", "True", "False"]


# ------------------------------------------------------------------------------------------------------------ on a GPU only

STEP: Final = Case(
    (Sequence(700, 1), Sequence(3, 1), Sequence(50, 70)),
    (LayerShape(2, 64, 64),),
    group=4,
    block_size=16,
    dtype=torch.bfloat16,
)


@on_gpu
def test_nothing_waits_for_the_device(subject: Subject) -> None:
    run = _runnable(subject)
    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_a_step_is_captured_in_a_graph_and_replayed(subject: Subject) -> None:
    backend, device = subject.backend, subject.device
    (layer,) = step_of(STEP).layers
    tables = tables_of([-(-one.context // 16) for one in STEP.sequences], "shuffled", 1)
    shape = CacheShape(STEP.layers, 16, STEP.dtype)
    blocks = max(map(max, tables)) + 2
    cache = KvCache(shape, torch.randn(blocks, backend.layout(shape).elements, device=device).bfloat16())
    prepared = backend.prepare(cache, rows_of(STEP.sequences, tables, 16, cache.scratch, device))
    queries = layer.queries.to(device)
    rule = AttentionRule(scale=0.125)
    expected = backend.paged_attention(prepared, 0, queries, rule).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backend.paged_attention(prepared, 0, queries, rule)
    found.fill_(math.nan)
    graph.replay()
    assert torch.equal(found, expected)


@on_gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_contexts(subject: Subject, head_size: int, dtype: torch.dtype) -> None:
    sequences = (Sequence(9000, 1), Sequence(1023, 1), Sequence(600, 300), Sequence(0, 200))
    layer = LayerShape(1, head_size, head_size)
    case = replace(STEP, sequences=sequences, layers=(layer,), group=2, dtype=dtype)
    check(subject.backend, case, subject.device)


def _runnable(subject: Subject) -> Callable[[], None]:
    """Return a function that does everything that a step can ask for."""
    backend, device = subject.backend, subject.device
    shape = CacheShape(STEP.layers, 16, STEP.dtype)
    tables = tables_of([-(-one.context // 16) for one in STEP.sequences], "shuffled", 1)
    cache = KvCache(shape, torch.zeros(max(map(max, tables)) + 2, backend.layout(shape).elements, device=device).bfloat16())
    rows = rows_of(STEP.sequences, tables, 16, cache.scratch, device)
    queries = torch.zeros(72, 8, 64, device=device).bfloat16()
    keys = torch.zeros(72, 2, 64, device=device).bfloat16()
    host = torch.zeros(4, cache.frames.shape[1], dtype=torch.bfloat16, pin_memory=True)

    def run() -> None:
        prepared = backend.prepare(cache, rows)
        backend.write_kv(prepared, 0, keys, keys)
        backend.paged_attention(prepared, 0, queries, AttentionRule(scale=0.125))
        backend.copy_blocks(cache, [(0, 1), (2, 3)])
        backend.swap_blocks(cache.frames, host, [(0, 1), (1, 2)])
        backend.swap_blocks(host, cache.frames, [(1, 4)])

    return run
