"""The reads of memory that kernels are compared with: plain_read.cpp, compiled when it is needed, for this machine.

Knows a compiler and a pointer. They are no part of the kernels' own library: one yardstick for all backends.

The compiler's OpenMP has to be the one that torch has brought: of two in one process every call takes milliseconds. The loader
takes the one of torch for both if they have one name, and torch is there first.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch import Tensor

_SOURCE: Final = Path(__file__).with_suffix(".cpp")
_FLAGS: Final = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_TIMEOUT_S: Final = 120
_MAPS: Final = Path("/proc/self/maps")

_RUNTIME: Final = re.compile(r"/lib[gi]?omp[^/]*\.so[^/]*$")

#: A thread's piece is a multiple of this; so is its address of the alignment.
STEP: Final = 256
_ALIGNMENT: Final = 64


class ReadError(Exception):
    """There can be no plain read here: one line for people, and perhaps the compiler's own."""


Read = Callable[[Tensor], int]


def reads(threads: int) -> tuple[Read, Read]:
    """Compile and load. Returns the plain read and that of several streams; each gives the exclusive or of a tensor's words.

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
            raise ReadError(f"reading needs a C++ compiler, and {shlex.join(command)} can't be run: {error}") from error
        if done.returncode != 0:
            raise ReadError(f"{shlex.join(command)} does not take {_SOURCE.name}\n{done.stderr.strip()}")
        before = _runtimes()
        loaded = ctypes.CDLL(str(library))
    if more := _runtimes() - before:
        raise ReadError(f"the reads' OpenMP is not torch's, they would fight for the cores: {', '.join(sorted(more))}")
    return _read(loaded.plain_read, threads), _read(loaded.stream_read, threads)


def _read(function: Any, threads: int) -> Read:  # noqa: ANN401 - ctypes has no type for a function of a library
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def read(memory: Tensor) -> int:
        pointer, size = memory.data_ptr(), memory.nbytes
        assert memory.is_contiguous()
        assert pointer % _ALIGNMENT == 0
        assert size % (STEP * threads) == 0
        return int(function(pointer, size, threads))

    return read


def _runtimes() -> set[str]:
    """Return the files of the OpenMP runtimes in this process."""
    try:
        text = os.fsdecode(_MAPS.read_bytes())  # names of files are bytes, not always UTF-8
    except OSError as error:
        raise ReadError(f"{_MAPS}, which tells of OpenMP's runtimes, can't be read: {error.strerror}") from None
    files = {line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in text.split("\n") if line}
    return {file for file in files if _RUNTIME.search(file)}
