"""The parts of `benchmarks.kernels`: each case measured, one after another.

Knows which contenders a case has and what a row is made of; not how anything is printed.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from benchmarks import kernels_cases as cases
from benchmarks.kernels_cases import Case, NoRoomError, Room, Weight, room
from benchmarks.kernels_data import TOLERANCE, difference, noise, queries
from benchmarks.kernels_peers import Contiguous, Vllm
from benchmarks.kernels_pools import Paged
from benchmarks.kernels_report import (
    IN_ORDER,
    ONE_BLOCK,
    ONE_RUN,
    AttentionRow,
    BlocksRow,
    ProductRow,
    Skip,
    TableRow,
)
from benchmarks.kernels_rounds import Clock, Contender, CpuClock, CudaClock, Here, Limits, fastest, measure, ratio
from benchmarks.plain_read import STEP, Read, reads
from kernels.cpu.library import LibraryError
from kernels.cpu.operations import Operations, PackedWeight, pack
from kernels.interface import AttentionBackend, CacheShape, LayerShape

_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_READ: Final = "read"
_STREAMS: Final = "streams"
_OURS: Final = "ours"
_SCATTERED: Final = "scattered"


#: Rows [n, inputs] and a weight [outputs, inputs] to [n, outputs].
Product = Callable[[Tensor, PackedWeight], Tensor]


class WrongError(Exception):
    """Two that are compared do not compute the same: nothing is said about their speed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases have in common."""

    backend: AttentionBackend[Any]
    device: torch.device
    dtype: torch.dtype
    threads: int
    cache_bytes: int
    limit_bytes: int  # of the tensors of one case
    limits: Limits
    clock: Clock
    reads: dict[str, Here]  # the plain read; where there is one, that of several streams
    read_bytes: int  # of one of their calls
    readers: dict[str, Read]  # what they call, on a CPU
    tell: Callable[[], None]  # between rounds

    def room(self, case: Case, *, pools: int = 1, peers: bool = False) -> Room:
        """See kernels_cases."""
        sparse = self.device.type == "cpu"
        return room(case, self.dtype.itemsize, self.cache_bytes, self.limit_bytes, pools=pools, peers=peers, sparse=sparse)

    def here(self, call: Callable[[int], object]) -> Here:
        """Return a contender on the device."""
        return Here(call, self.clock)

    def paged(self, case: Case, found: Room, *, scattered: bool) -> Paged:
        """Return a pool full of the case's sequences."""
        return Paged(self.backend, case, found, self.dtype, self.device, scattered=scattered)


def setting(
    backend: AttentionBackend[Any],
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    cache_bytes: int,
    limit_bytes: int,
    limits: Limits,
    tell: Callable[[], None],
) -> Setting:
    """Return a setting with its reads; on a GPU with a copy instead, which reads and writes.

    Raises:
        ReadError: there is no compiler for it.
    """
    if device.type == "cpu":
        step = STEP * threads
        pieces = torch.ones(cases.ROTATION, max(1, cache_bytes // step) * step // 8, dtype=torch.int64)
        readers = dict(zip((_READ, _STREAMS), reads(threads), strict=True))
        calls = {name: _reading(reader, pieces) for name, reader in readers.items()}
        clock: Clock = CpuClock()
        moved = pieces[0].nbytes
    else:
        pieces = torch.ones(2, cases.rotation_bytes(cache_bytes) // 16, dtype=torch.int64, device=device)
        readers = {}
        calls = {_READ: lambda number: pieces[number % 2].copy_(pieces[1 - number % 2])}
        clock = CudaClock()
        moved = pieces.nbytes
    contenders = {name: Here(call, clock) for name, call in calls.items()}
    return Setting(backend, device, dtype, threads, cache_bytes, limit_bytes, limits, clock, contenders, moved, readers, tell)


def _reading(reader: Read, pieces: Tensor) -> Callable[[int], object]:
    """Return a contender that reads pieces [n, ...] one after another."""
    return lambda number: reader(pieces[number % len(pieces)])


def last_cache_bytes(device: torch.device) -> int:
    """Return the size of the last cache before the memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = {int((index / "level").read_text()): (index / "size").read_text() for index in _CACHES.glob("index*")}
    return cases.cache_size(levels[max(levels)])


def attention(found: Setting, chosen: Sequence[Case], vllm: Vllm | None) -> Iterator[AttentionRow | Skip]:
    """Measure decodes and prefill chunks."""
    for case in chosen:
        gc.collect()  # the last case's tensors
        try:
            yield _attention(found, case, vllm if case.part == cases.DECODE else None)
        except NoRoomError as error:
            yield Skip(case.name, str(error))


def _attention(found: Setting, case: Case, vllm: Vllm | None) -> AttentionRow:
    space = found.room(case, peers=True)
    paged = found.paged(case, space, scattered=True)
    contiguous = Contiguous(case, space, found.dtype, found.device)
    ways = contiguous.ways()
    way = fastest({name: found.here(call) for name, call in ways.items()})
    gathered = contiguous.gathered(way)
    expected = paged(0)
    for name, call in {**ways, "gathered": gathered}.items():
        _check(case.name, name, call(0), expected)
    contenders: dict[str, Contender] = {
        **found.reads, _OURS: found.here(paged), "torch": found.here(ways[way]), "gathered": found.here(gathered)
    }  # fmt: skip
    if vllm is not None:
        _check(case.name, "vLLM", vllm.load(case, found.dtype), expected)
        contenders["vllm"] = vllm
    times = measure(contenders, found.limits, found.tell)
    seconds, size = statistics.median(times[_OURS]), case.read_bytes(found.dtype.itemsize)
    return AttentionRow(
        part=case.part,
        name=case.name,
        us=seconds * 1e6,
        bytes=size,
        gb_s=size / seconds / 1e9,
        share=_share(found, times, size, _READ),
        share_of_streams=_share(found, times, size, _STREAMS) if _STREAMS in times else None,
        torch_ratio=ratio(times["torch"], times[_OURS]),
        torch_way=way,
        gathered_ratio=ratio(times["gathered"], times[_OURS]),
        vllm_ratio=ratio(times["vllm"], times[_OURS]) if vllm is not None else None,
        rounds=len(times[_OURS]),
    )


def table(found: Setting, chosen: Sequence[Case]) -> Iterator[TableRow | Skip]:
    """Measure scattered tables beside contiguous runs."""
    for case in chosen:
        gc.collect()
        try:
            yield _table(found, case)
        except NoRoomError as error:
            yield Skip(case.name, str(error))


def _table(found: Setting, case: Case) -> TableRow:
    space = found.room(case, pools=4)
    one_layer = replace(space, frame_layers=1, layers=1, sets=space.layers * space.sets)
    pools = {
        _SCATTERED: found.paged(case, space, scattered=True),
        IN_ORDER: found.paged(case, space, scattered=False),
        ONE_RUN: found.paged(case, one_layer, scattered=False),
    }
    if _takes(found, whole := replace(case, block_size=case.tokens)):
        pools[ONE_BLOCK] = found.paged(whole, space, scattered=False)
    times = _measure_pools(found, case.name, pools)
    scattered = times.pop(_SCATTERED)
    return TableRow(
        name=case.name,
        us=statistics.median(scattered) * 1e6,
        ratios={name: ratio(scattered, other) for name, other in times.items()},
        rounds=len(scattered),
    )


def blocks(found: Setting, curves: Sequence[Sequence[Case]]) -> Iterator[BlocksRow | Skip]:
    """Measure the same sequences in blocks of all sizes."""
    for curve in curves:
        gc.collect()
        name = curve[0].name.partition(" block ")[0]
        try:
            yield _blocks(found, name, curve)
        except NoRoomError as error:
            yield Skip(name, str(error))


def _blocks(found: Setting, name: str, curve: Sequence[Case]) -> BlocksRow:
    spaces = [found.room(case, pools=len(curve)) for case in curve]
    pools = {str(case.block_size): found.paged(case, space, scattered=True) for case, space in zip(curve, spaces, strict=True)}
    times = _measure_pools(found, name, pools)
    best = min(times, key=lambda block_size: statistics.median(times[block_size]))
    return BlocksRow(
        name=name,
        best=int(best),
        us=statistics.median(times[best]) * 1e6,
        ratios=tuple(ratio(of_size, times[best]) for of_size in times.values()),
        rounds=len(times[best]),
    )


def _measure_pools(found: Setting, name: str, pools: dict[str, Paged]) -> dict[str, list[float]]:
    """Measure pools with the same sequences beside one another."""
    expected = next(iter(pools.values()))(0)
    for which, pool in pools.items():
        _check(name, which, pool(0), expected)
    return measure({which: found.here(pool) for which, pool in pools.items()}, found.limits, found.tell)


def products(found: Setting, weights: Sequence[Weight], rows: Sequence[int]) -> Iterator[ProductRow | Skip]:
    """Measure products of a few rows with a weight, beside torch's and oneDNN's with the weight packed once."""
    if found.device.type != "cpu":
        yield Skip(cases.PRODUCTS, "they are the CPU's; on a GPU torch multiplies")
        return
    if found.dtype == torch.float16:
        yield Skip(cases.PRODUCTS, "there are none of our own in float16")
        return
    try:
        linear = Operations().linear
    except LibraryError as error:
        yield Skip(cases.PRODUCTS, str(error))
        return
    for weight in weights:
        gc.collect()
        try:
            yield from _products_of(found, weight, rows, linear)
        except NoRoomError as error:
            yield Skip(weight.name, str(error))


def _products_of(found: Setting, weight: Weight, rows: Sequence[int], linear: Product) -> Iterator[ProductRow]:
    count = cases.weight_copies(weight, found.dtype.itemsize, found.cache_bytes, found.limit_bytes)
    plain = torch.empty(count, weight.outputs, weight.inputs, dtype=found.dtype)
    plain[:] = noise(weight.outputs * weight.inputs, 0).view(weight.outputs, weight.inputs)
    ours = [pack(copy) for copy in plain]
    for number in rows:
        packed = [_packed(copy, number) for copy in plain]
        yield _product(found, weight, number, plain, packed, ours, linear)
        packed.clear()  # before the next ones are made


def _product(
    found: Setting,
    weight: Weight,
    rows: int,
    plain: Tensor,
    packed: Sequence[Tensor],
    ours: Sequence[PackedWeight],
    linear: Product,
) -> ProductRow:
    given = queries(rows, 1, weight.inputs, found.dtype).view(rows, weight.inputs)
    products: dict[str, Callable[[int], Tensor]] = {
        _OURS: lambda number: linear(given, ours[number % len(ours)]),
        "linear": lambda number: F.linear(given, plain[number % len(plain)]),
        "packed": lambda number: _packed_product(given, packed[number % len(packed)]),
    }
    expected = products["linear"](0)
    for name, call in products.items():
        _check(f"{rows} x {weight.name}", name, call(0), expected)
    # Some products are over in tens of microseconds: a read of as many bytes has to begin and to end as often.
    readings = {name: _reading(reader, plain) for name, reader in found.readers.items()}
    times = measure({name: found.here(call) for name, call in (products | readings).items()}, found.limits, found.tell)
    seconds, size = statistics.median(times[_OURS]), weight.bytes(found.dtype.itemsize)
    return ProductRow(
        name=weight.name,
        rows=rows,
        us=seconds * 1e6,
        bytes=size,
        gb_s=size / seconds / 1e9,
        share=ratio(times[_READ], times[_OURS]),
        share_of_streams=ratio(times[_STREAMS], times[_OURS]),
        linear_ratio=ratio(times["linear"], times[_OURS]),
        packed_ratio=ratio(times["packed"], times[_OURS]),
        rounds=len(times[_OURS]),
    )


def _packed(weight: Tensor, rows: int) -> Tensor:
    """Return a weight as oneDNN likes it best for so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # type: ignore[no-any-return]


def _packed_product(rows: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")  # type: ignore[no-any-return]


def _share(found: Setting, times: dict[str, list[float]], size: int, read: str) -> float:
    """Return our speed by that of a read."""
    return ratio(times[read], times[_OURS]) * size / found.read_bytes


def _takes(found: Setting, case: Case) -> bool:
    """Tell whether the backend takes blocks of this size."""
    heads = case.heads
    shape = CacheShape((LayerShape(heads.kv_heads, heads.size, heads.size),), case.block_size, found.dtype)
    try:
        found.backend.layout(shape)
    except ValueError:
        return False
    return True


def _check(case: str, name: str, result: Tensor, expected: Tensor) -> None:
    """Compare results.

    Raises:
        WrongError: see the class.
    """
    found = difference(result, expected)
    if not found <= TOLERANCE:  # NaN is not
        raise WrongError(f"{case}: what {name} computes differs by {found:.3g} of the largest value")
