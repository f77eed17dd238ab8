"""Loads the compiled library, and says in Python what native/abi.h says in C++.

Knows files, structures, signatures and torch's OpenMP; not what is computed. It refuses a library that is not of these sources.

Threads. Two OpenMP runtimes in one process cost milliseconds a call, and torch's wheels bring one under a path of their own. So
the library links to none: it is handed the functions of the one that torch's own code calls. Without one it works on one thread.

The interpreter's lock. A call that gives it up has to get it back, and waits up to 5 ms (`sys.getswitchinterval`) where another
Python thread is busy. So calls that end well within that keep it (PyDLL); attention, copies and programs, which may take longer,
give it up (CDLL).
"""

import ctypes
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from kernels.cpu import build

#: As kAbi in native/abi.h.
ABI: Final = 3

#: As kMaxTurned in native/abi.h.
MAX_TURNED: Final = 1024

#: As Status in native/main.cpp.
DONE: Final = 0
WORKSPACE_TOO_SMALL: Final = 2

#: As Element in native/abi.h.
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: Of an ELF64 file's first 64 bytes: where its table of sections lies, the size of an entry, and how many there are.
_ELF_HEADER: Final = struct.Struct("<40xQ10xHH2x")

_MAPS: Final = Path("/proc/self/maps")


class LibraryError(Exception):
    """The library can't be used: one line for people."""


class Layer(ctypes.Structure):
    """One layer of a pool; all structures here are explained in native/abi.h."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("frame_stride", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("key_size", ctypes.c_int32),
        ("value_size", ctypes.c_int32),
    )


class Rows(ctypes.Structure):
    """The rows of one step."""

    _fields_ = (
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("query_lengths", ctypes.c_void_p),
        ("context_lengths", ctypes.c_void_p),
        ("write_slots", ctypes.c_void_p),
        ("sequences", ctypes.c_int32),
        ("decodes", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    )


class Strided(ctypes.Structure):
    """[rows, heads, size] with strides."""

    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class AttendCall(ctypes.Structure):
    """Attention of one step in one layer."""

    _fields_ = (
        ("layer", Layer),
        ("rows", Rows),
        ("queries", Strided),
        ("output", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("q_heads", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class WriteCall(ctypes.Structure):
    """K and V of one step's rows into one layer."""

    _fields_ = (("layer", Layer), ("rows", Rows), ("keys", Strided), ("values", Strided), ("threads", ctypes.c_int32))


class CopyCall(ctypes.Structure):
    """Whole frames from one place to another."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("source_stride", ctypes.c_int64),
        ("destination_stride", ctypes.c_int64),
        ("frame_bytes", ctypes.c_int64),
        ("moves", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class LinearCall(ctypes.Structure):
    """Rows times a weight."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class NormCall(ctypes.Structure):
    """An RMS norm, of a sum or not."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class GateCall(ctypes.Structure):
    """SiLU of one half of a row times the other."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class RotateCall(ctypes.Structure):
    """Rotary embedding, and then a write."""

    _fields_ = (
        ("write", WriteCall),
        ("queries", Strided),
        ("turned", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("cosine_stride", ctypes.c_int64),
        ("sine_stride", ctypes.c_int64),
        ("q_heads", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    )


class PeaksCall(ctypes.Structure):
    """The largest element of each row."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("maxima", ctypes.c_void_p),
        ("indexes", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class Operation(ctypes.Structure):
    """One operation of a program."""

    _fields_ = (("call", ctypes.c_void_p), ("kind", ctypes.c_int32), ("layer", ctypes.c_int32))


#: As Kind in native/abi.h.
KINDS: Final[dict[type[ctypes.Structure], int]] = {LinearCall: 0, NormCall: 1, GateCall: 2, RotateCall: 3, AttendCall: 4}

#: In the order of kilburn_sizeof's argument.
STRUCTURES: Final[tuple[type[ctypes.Structure], ...]] = (
    Layer, Rows, Strided, AttendCall, WriteCall, CopyCall, LinearCall, NormCall, GateCall, RotateCall, PeaksCall, Operation,
)  # fmt: skip

#: What kilburn_use_threads takes: what runs a parallel region in every OpenMP runtime, and what tells a thread its number and how
#: many there are.
_OPENMP: Final = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True, slots=True)
class Library:
    """The library's functions. `instructions` is the index of one of the instruction sets; structures come as `ctypes.byref`.

    Whoever calls keeps the memory that a structure points to, and does so from one thread of the process, that which calls torch:
    its runtime has a team of threads for each thread that asks for one.
    """

    path: Path
    openmp: Path | None  # whose threads work
    why_one_thread: str  # empty where there is OpenMP
    supported: dict[str, int]  # the instruction sets of this machine that were compiled, best last, and their indexes
    layer_elements: Callable[..., int]  # (layer)
    attend_workspace: Callable[..., int]  # (instructions, call)
    attend: Callable[..., int]  # (instructions, call) -> status
    write: Callable[..., int]  # (instructions, call) -> status
    copy: Callable[..., None]  # (call)
    linear: Callable[..., int]  # (instructions, call) -> status
    rms_norm: Callable[..., int]  # (instructions, call) -> status
    silu_mul: Callable[..., int]  # (instructions, call) -> status
    rotate_write: Callable[..., int]  # (instructions, call) -> status
    peaks: Callable[..., int]  # (instructions, call) -> status
    run: Callable[..., int]  # (instructions, operations, count, threads, layer) -> status
    read: Callable[[int, int, int, int], int]  # (instructions, address, bytes, threads) -> exclusive or of all words

    def choose(self, wanted: str | None) -> str:
        """Return the instruction set of that name, or the best one.

        Raises:
            LibraryError: this machine does not have it, or the library was compiled without it.
        """
        if wanted is None:
            return list(self.supported)[-1]
        if wanted not in self.supported:
            raise LibraryError(f"{wanted} can't be used here; there is {', '.join(self.supported)}")
        return wanted

    def number(self, name: str) -> int:
        """Return what the functions call a supported instruction set."""
        return self.supported[name]


def why_missing() -> str:
    """Return why the library can't be used in this process; empty: it can."""
    try:
        load()
    except LibraryError as error:
        return str(error)
    return ""


def instructions() -> tuple[str, ...]:
    """Return the instruction sets that can be used here, best last."""
    return tuple(load().supported)


@cache
def load() -> Library:
    """Load the installation's library.

    Raises:
        LibraryError: see the class.
    """
    return load_from(build.COMPILED)


def load_from(folder: Path) -> Library:
    """Load the library that lies in this folder.

    Raises:
        LibraryError: see the class.
    """
    path = _checked(folder)
    try:
        if not _is_whole(path):
            raise LibraryError(f"{path} is cut short: run `make compile`")
        releasing, holding = ctypes.CDLL(os.fspath(path)), ctypes.PyDLL(os.fspath(path))
    except OSError as error:
        raise LibraryError(f"{path} can't be loaded: {error}") from None
    _check_abi(holding, path)
    supports = _function(holding, "kilburn_supports", ctypes.c_int32, ctypes.c_int32)
    supported = {name: index for index, name in enumerate(build.INSTRUCTION_SETS) if supports(index)}
    if not supported:
        raise LibraryError(f"this machine has none of the instruction sets {', '.join(build.INSTRUCTION_SETS)}")
    openmp, why_one_thread = _use_openmp(holding)
    pointers = [ctypes.POINTER(structure) for structure in STRUCTURES]
    layer, _, _, attend, write, copy, linear, norm, gate, rotate, peaks, operation = pointers
    read = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    return Library(
        path=path,
        openmp=openmp,
        why_one_thread=why_one_thread,
        supported=supported,
        layer_elements=_function(holding, "kilburn_layer_elements", ctypes.c_int64, layer),
        attend_workspace=_function(holding, "kilburn_attend_workspace", ctypes.c_int64, ctypes.c_int32, attend),
        attend=_function(releasing, "kilburn_attend", ctypes.c_int, ctypes.c_int32, attend),
        write=_function(holding, "kilburn_write", ctypes.c_int, ctypes.c_int32, write),
        copy=_function(releasing, "kilburn_copy", None, copy),
        linear=_function(holding, "kilburn_linear", ctypes.c_int, ctypes.c_int32, linear),
        rms_norm=_function(holding, "kilburn_rms_norm", ctypes.c_int, ctypes.c_int32, norm),
        silu_mul=_function(holding, "kilburn_silu_mul", ctypes.c_int, ctypes.c_int32, gate),
        rotate_write=_function(holding, "kilburn_rotate_write", ctypes.c_int, ctypes.c_int32, rotate),
        peaks=_function(holding, "kilburn_peaks", ctypes.c_int, ctypes.c_int32, peaks),
        run=_function(
            releasing, "kilburn_run", ctypes.c_int, ctypes.c_int32, operation, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
        ),
        read=_function(releasing, "kilburn_read", ctypes.c_uint64, *read),
    )


def _checked(folder: Path) -> Path:
    """Return the library's path, if it is there, whole, and of the sources that lie beside it."""
    path, stamp = folder / build.LIBRARY, folder / build.STAMP
    try:
        made_of = stamp.read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        made_of = ""
    if not made_of or not path.exists():
        raise LibraryError("they were not compiled: a C++ compiler has to be there at the installation; see `make compile`")
    if build.has_sources() and build.digest() != made_of:
        raise LibraryError("their sources have changed since they were compiled: run `make compile`")
    return path


def _is_whole(path: Path) -> bool:
    """Tell whether an ELF file reaches to the end of its table of sections, which linkers put last.

    Loading half a file ends the process by a signal. What is no ELF file at all the loader refuses itself.
    """
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
        end = file.seek(0, os.SEEK_END)
    if len(header) < _ELF_HEADER.size or not header.startswith(b"\x7fELF"):
        return True
    table, size, count = _ELF_HEADER.unpack(header)
    return bool(table + size * count <= end)


def _check_abi(library: ctypes.CDLL, path: Path) -> None:
    """Compare what must be alike here and there: the number, and the size of each structure."""
    try:
        number = _function(library, "kilburn_abi", ctypes.c_int32)()
    except AttributeError:
        raise LibraryError(f"{path} is some other library: run `make compile`") from None
    if number != ABI:
        raise LibraryError(f"{path} speaks version {number}, this package {ABI}: run `make compile`")
    size = _function(library, "kilburn_sizeof", ctypes.c_int64, ctypes.c_int32)
    there = [size(index) for index in range(len(STRUCTURES) + 1)]  # 0 behind the last
    here = [*(ctypes.sizeof(structure) for structure in STRUCTURES), 0]
    if there != here:
        raise LibraryError(f"{path} has structures of {there} bytes, this package of {here}: run `make compile`")


def _function(library: ctypes.CDLL, name: str, returns: type[Any] | None, *takes: type[Any]) -> Callable[..., Any]:
    function = library[name]  # a new one each time: no other caller's signature
    function.restype, function.argtypes = returns, takes
    return function


def _use_openmp(library: ctypes.CDLL) -> tuple[Path | None, str]:
    """Hand over torch's OpenMP; return its file, or why there is none."""
    for scope in _scopes():
        try:
            addresses = [ctypes.cast(scope[name], ctypes.c_void_p).value or 0 for name in _OPENMP]
        except AttributeError:
            continue
        files = {_mapped(address) for address in addresses}
        if len(files) != 1:  # of two runtimes, and a region of the one does not know its number by the other
            continue
        _function(library, "kilburn_use_threads", None, *[ctypes.c_void_p] * len(_OPENMP))(*addresses)
        return files.pop(), ""
    return None, "torch has brought no OpenMP runtime into this process"


def _scopes() -> list[ctypes.CDLL]:
    """Return where torch's own calls are looked up, in this order: what is global in the process, then what torch links to."""
    linked = sorted({line[-1] for line in _maps() if line[-1].rpartition("/")[2].startswith("libtorch_cpu.so")})
    return [ctypes.CDLL(None), *(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for path in linked)]


def _mapped(address: int) -> Path | None:
    """Return the file that is mapped at an address."""
    for line in _maps():
        first, _, last = line[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return Path(line[-1])
    return None


def _maps() -> list[list[str]]:
    """Return the lines of the process's maps that have a file: a range of addresses first, the file last."""
    text = os.fsdecode(_MAPS.read_bytes())  # names of files are bytes, not always UTF-8
    lines = [line.split(maxsplit=5) for line in text.split("\n")]
    return [line for line in lines if len(line) == 6 and line[-1].startswith("/")]
