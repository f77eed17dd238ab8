"""The plain read that kernels are compared with: plain_read.cpp, compiled when it is needed, for this machine.

Knows a compiler and a pointer. It is no part of the kernels' own library, so that a yardstick of one is there for all backends.

The compiler's OpenMP has to be the one that torch has brought: of two in one process every call takes milliseconds. The loader
takes the one of torch for both if they have one name, and torch is there first.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

_SOURCE: Final = Path(__file__).with_suffix(".cpp")
_FLAGS: Final = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
_TIMEOUT_S: Final = 120
_MAPS: Final = Path("/proc/self/maps")

#: A thread's piece is a multiple of this; so is its address of the alignment.
_STEP: Final = 256
_ALIGNMENT: Final = 64


class ReadError(Exception):
    """There can be no plain read here: one line for people, and perhaps the compiler's own."""


def plain_read(threads: int) -> Callable[[Tensor], int]:
    """Compile and load. Returns what reads a contiguous tensor with so many threads, and gives the exclusive or of its words.

    Raises:
        ReadError: see the class.
    """
    command = tuple(shlex.split(os.environ.get("CXX", ""))) or ("c++",)
    with tempfile.TemporaryDirectory(prefix="kilburn-read-") as folder:
        library = Path(folder) / "plain_read.so"
        try:
            done = subprocess.run(
                (*command, *_FLAGS, "-o", str(library), str(_SOURCE)),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReadError(f"the plain read needs a C++ compiler, and {shlex.join(command)} can't be run: {error}") from error
        if done.returncode != 0:
            raise ReadError(f"{shlex.join(command)} does not take {_SOURCE.name}\n{done.stderr.strip()}")
        torch.get_num_threads()  # its OpenMP is there by now
        function = ctypes.CDLL(str(library)).plain_read
    runtimes = {line.split()[-1] for line in _MAPS.read_text(encoding="utf-8").splitlines() if "gomp" in line or "iomp" in line}
    if len(runtimes) != 1:
        raise ReadError(f"the plain read needs torch's OpenMP and no other in this process: {', '.join(sorted(runtimes))}")
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def read(memory: Tensor) -> int:
        pointer, size = memory.data_ptr(), memory.nbytes
        assert memory.is_contiguous()
        assert pointer % _ALIGNMENT == 0
        assert size % (_STEP * threads) == 0
        return int(function(pointer, size, threads))

    return read
