"""The native library compiled with sanitizers, and how a process has to be started that loads it.

Knows AddressSanitizer, the compiler that has it, and the backend's calls; not what is tried. ASan sees the accesses of code that
was compiled with it to whatever malloc gave: to torch's tensors too, each of its exact size, as torch keeps no memory back on the
CPU. Frames of a pool can be forbidden besides.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from kernels.cpu import backend as backend_module
from kernels.cpu import build, library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import KINDS, AttendCall, GateCall, LinearCall, NormCall, RotateCall
from kernels.interface import KvCache

#: Nothing is optimized: an access that is of no use is made all the same.
ADDRESSES: Final = ("-fsanitize=address", "-fno-sanitize-recover=all", "-O0", "-g1")

#: Undefined behaviour besides: twice as long to compile.
ALL: Final = (*ADDRESSES, "-fsanitize=undefined")

#: What a process ends with where a sanitizer found something.
EXIT_CODE: Final = 99

#: Leaks and mismatches of torch and Python are not ours to find.
_OPTIONS: Final = {
    "ASAN_OPTIONS": f"detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0:exitcode={EXIT_CODE}",
    "UBSAN_OPTIONS": f"halt_on_error=1:print_stacktrace=1:exitcode={EXIT_CODE}",
}

_ASK_TIMEOUT_S: Final = 30


def environment() -> Mapping[str, str]:
    """Return what a process needs besides its environment: the sanitizer before all libraries, a malloc for each object."""
    compiler = os.environ.get("CXX", "c++").split()
    asked = subprocess.run(
        [*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=_ASK_TIMEOUT_S
    )
    return {**_OPTIONS, "LD_PRELOAD": str(Path(asked.stdout.strip()).resolve()), "PYTHONMALLOC": "malloc"}


def compile_into(folder: Path, flags: Sequence[str]) -> None:
    """Compile the library, unless the folder has it."""
    build.build(folder, flags)


def use(folder: Path) -> None:
    """Let this process take the library from this folder. Not to be undone."""
    library.load = cache(lambda: library.load_from(folder))
    # The workspace ends where its last byte is: torch's memory begins at a multiple of 64 anyway.
    backend_module._ALIGNMENT = 1  # type: ignore[misc]


@contextmanager
def forbidden(pool: KvCache, tables: list[list[int]]) -> Iterator[None]:
    """Let every access end the process that is to a frame which no table names, the scratch frame too."""
    asan = ctypes.CDLL(None)
    size = pool.frames.shape[1] * pool.frames.element_size()
    named = {block for table in tables for block in table}
    others = [pool.frames.data_ptr() + block * size for block in range(pool.frames.shape[0]) if block not in named]
    for address in others:
        asan.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))
    try:
        yield
    finally:
        for address in others:
            asan.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))


# ------------------------------------------------------------------------------------------------------ faults to be found


@dataclass(frozen=True, slots=True)
class Plant:
    """An address in a call that is moved: by one float32 or one entry, where nothing else is said."""

    function: Literal["attend", "write", "run"]
    path: str
    bytes: int = 4
    call: type[Any] | None = None  # of `run`: the kind of the operations that have the fault
    where: Callable[[Any], bool] = lambda _: True  # and which of them

    def put(self, call: Any) -> None:
        """Put the fault into a call."""
        *inside, name = self.path.split(".")
        for part in inside:
            call = getattr(call, part)
        address = getattr(call, name)
        if address is not None:  # as sinks, where there are none
            setattr(call, name, address + self.bytes)


PLANTS: Final = {
    "queries": Plant("attend", "queries.data"),
    "output": Plant("attend", "output"),
    "tables": Plant("attend", "rows.tables"),
    "contexts": Plant("attend", "rows.context_lengths"),
    "frames": Plant("attend", "layer.base"),
    "sinks": Plant("attend", "sinks"),
    "workspace": Plant("attend", "workspace", bytes=8192),  # its end is for what the last thread never has
    "keys": Plant("write", "keys.data"),
    "values": Plant("write", "values.data"),
    "slots": Plant("write", "rows.write_slots", bytes=8),
    "written frames": Plant("write", "layer.base"),
    "a program's weight": Plant("run", "weight", call=LinearCall),
    "a program's bias": Plant("run", "bias", call=LinearCall),
    "a wide product": Plant("run", "output", call=LinearCall, where=lambda call: bool(call.wide)),
    "a program's sum": Plant("run", "sum", call=NormCall),
    "norms of heads": Plant("run", "output", call=NormCall, where=lambda call: call.heads > 1),
    "heads of norms": Plant("run", "head_stride", 64, NormCall, lambda call: call.heads > 1),
    "a program's gate": Plant("run", "input", call=GateCall),
    "a program's angles": Plant("run", "cosines", call=RotateCall),
    "a program's heads": Plant("run", "turned", call=RotateCall),
    "a program's output": Plant("run", "output", call=AttendCall),
}


def planted(name: str) -> CpuBackend:
    """Return a backend whose calls have that fault."""
    plant, faulty = PLANTS[name], CpuBackend()
    function = getattr(faulty._library, plant.function)

    def call(instructions: int, reference: Any) -> int:
        plant.put(reference._obj)
        status: int = function(instructions, reference)
        return status

    def run(instructions: int, operations: Any, *others: Any) -> int:
        assert plant.call is not None
        for operation in operations:
            if operation.kind == KINDS[plant.call]:
                its = plant.call.from_address(operation.call)
                if plant.where(its):
                    plant.put(its)
        status: int = function(instructions, operations, *others)
        return status

    known = faulty._library
    if plant.function == "run":
        faulty._library = replace(known, run=run)
    else:
        faulty._library = replace(known, attend=call) if plant.function == "attend" else replace(known, write=call)
    return faulty
