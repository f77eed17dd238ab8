"""What Triton's kernels take of a chip: compiled for it with no GPU there, then registers, spills and shared memory.

    python -m benchmarks.triton_resources [--json | --write]

Every kernel is compiled from the launch that the backend would start, with the same tiles and the same knowledge of which numbers
are multiples of 16. `--write` puts the table into docs/kernels-triton.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks.options import help_of
from kernels.interface import AttentionRule, CacheShape, LayerShape
from kernels.triton.common import INTERPRETED
from kernels.triton.launches import Launch, Layer, Parts, copying, decoding, prefilling, writing
from kernels.triton.tiles import Chip

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "kernels-triton.md"
HEAD_SIZES: Final = (64, 128, 256)

_BEGIN: Final = "<!-- python -m benchmarks.triton_resources --write -->\n"
_END: Final = "<!-- end -->\n"

#: What comes with Triton: the disassembler's little sister, which tells what a kernel takes.
_CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# The step that is compiled for: any other of the same heads and dtype is the same kernel.
_KV_HEADS: Final = 8
_GROUP: Final = 4
_BLOCK_SIZE: Final = 16
_DECODES: Final = 8
_ROWS: Final = 600


@dataclass(frozen=True)
class Target:
    """A chip to compile for. Limits are those of the CUDA programming guide's table of compute capabilities."""

    capability: int
    chip: Chip
    shared_total: int  # bytes of a multiprocessor; each program takes 1 KiB more than it asks for


TARGETS: Final = (
    Target(80, Chip(processors=108, shared=163 * 1024, from_shared=False), 164 * 1024),
    Target(90, Chip(processors=132, shared=227 * 1024, from_shared=True), 228 * 1024),
)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one chip."""

    kernel: str
    head_size: int | None  # None: it does not matter
    capability: int
    warps: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    shared_limit: int
    programs: int  # on a multiprocessor at a time, as far as registers and shared memory let them


def launches(head_size: int, chip: Chip) -> Iterator[tuple[str, Launch]]:
    """Yield every kernel that a bfloat16 step of this head size can start."""
    layers = (LayerShape(_KV_HEADS, head_size, head_size),) * 2
    shape = CacheShape(layers, _BLOCK_SIZE, torch.bfloat16)
    elements = _BLOCK_SIZE * sum(layer.token_elements for layer in layers)
    heads = _KV_HEADS * _GROUP
    layer = Layer(_tensor(100, elements), shape, 1, _tensor(10, 513, dtype=torch.int32), _tensor(10, dtype=torch.int32), chip)
    queries, output = _tensor(_ROWS, heads, head_size), _tensor(_ROWS, heads, head_size)
    keys = _tensor(_ROWS, _KV_HEADS, head_size)
    starts = _tensor(11, dtype=torch.int32)
    parts = Parts(
        *(_tensor(_DECODES, 4, heads, *size, dtype=torch.float32) for size in ((head_size,), (), ())),
    )
    plain = AttentionRule(head_size**-0.5)
    full = AttentionRule(head_size**-0.5, window=4096, softcap=30.0, sinks=_tensor(heads))

    decode, join = decoding(layer, output, queries, plain, _DECODES, 512, parts)
    yield "decode, splits", decode
    yield "decode, one split; window, soft-cap, sinks", decoding(layer, output, queries, full, _DECODES, 512, None)[0]
    yield "join", join
    yield "prefill", prefilling(layer, output, queries, plain, _DECODES, 2, starts)
    yield "prefill; window, soft-cap, sinks", prefilling(layer, output, queries, full, _DECODES, 2, starts)
    yield "write", writing(layer, keys, keys, _tensor(_ROWS, dtype=torch.int64))


def measure() -> list[Resources]:
    """Compile everything for every chip."""
    found = []
    for target in TARGETS:
        for head_size in HEAD_SIZES:
            found += [resources(name, head_size, launch, target) for name, launch in launches(head_size, target.chip)]
        frames = _tensor(100, 4096)
        found.append(resources("copy", None, copying(frames, _tensor(3, 2, dtype=torch.int64)), target))
    return found


def resources(name: str, head_size: int | None, launch: Launch, target: Target) -> Resources:
    """Compile one kernel for one chip, and look at it."""
    compiled = compile_launch(launch, target.capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    numbers = {key: int(number) for key, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    registers, shared = numbers["REG"], compiled.metadata.shared
    # Registers are given out to a warp in pieces of 256.
    by_registers = 65536 // (launch.warps * -(-registers * 32 // 256) * 256)
    by_shared = target.shared_total // (shared + 1024)
    return Resources(
        kernel=name,
        head_size=head_size,
        capability=target.capability,
        warps=launch.warps,
        registers=registers,
        spilled=numbers["STACK"] + numbers["LOCAL"],
        shared=shared,
        shared_limit=target.chip.shared,
        programs=min(by_registers, by_shared, 64 // launch.warps),
    )


def compile_launch(launch: Launch, capability: int) -> triton.compiler.CompiledKernel:
    """Compile what a launch on a GPU of this capability would: the steps are those of `JITFunction.run`."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(backend, dict(launch.options), bound, specialization, None)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def table(found: Sequence[Resources], version: str) -> str:
    """Return the table of the document."""
    capabilities = [target.capability for target in TARGETS]
    lines = [
        f"Compiled by Triton {version}: registers of a thread, KiB of shared memory of a program, programs that fit on a",
        "multiprocessor at a time. Nothing is spilled unless it says so.",
        "",
        "| kernel, bfloat16 | head size | " + " | ".join(f"sm_{each}" for each in capabilities) + " |",
        "|---|--:|" + "--:|" * len(capabilities),
    ]
    cells: dict[tuple[str, int | None], dict[int, str]] = {}
    for one in found:
        spilled = f", {one.spilled} bytes spilled" if one.spilled else ""
        text = f"{one.registers}, {-(-one.shared // 1024)}, {one.programs} of {one.warps} warps{spilled}"
        cells.setdefault((one.kernel, one.head_size), {})[one.capability] = text
    for (kernel, head_size), row in cells.items():
        lines.append(f"| {kernel} | {head_size or 'any'} | " + " | ".join(row[each] for each in capabilities) + " |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the table that the document has."""
    text = DOCUMENT.read_text()
    return text[text.index(_BEGIN) + len(_BEGIN) : text.index(_END)]


def write(new: str) -> None:
    """Put a table into the document."""
    DOCUMENT.write_text(DOCUMENT.read_text().replace(_BEGIN + written() + _END, _BEGIN + new + _END))


def _tensor(*extent: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return what has a shape, strides and a dtype, and no memory."""
    return torch.empty(extent, dtype=dtype, device="meta")


@click.command(help=help_of(__doc__))
@click.option("--json", "as_json", is_flag=True, help="Print figures for other programs.")
@click.option("--write", "into_document", is_flag=True, help="Put the table into the document.")
def main(as_json: bool, into_document: bool) -> None:
    """Compile, and tell."""
    if INTERPRETED.value:
        sys.exit("TRITON_INTERPRET is set: there is nothing to compile")
    found = measure()
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found]))
        return
    click.echo(table(found, triton.__version__))
    if into_document:
        write(table(found, triton.__version__))


if __name__ == "__main__":
    main()
