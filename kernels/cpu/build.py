"""Compiles native/ into one library, and says what it was made of. `deploy/compile.py` loads this file alone.

Knows compilers and their flags; nothing of what is computed, and imports nothing of ours, so that a build needs no torch.

One source, native/isa.cpp, is compiled once for each instruction set, into an object of its own; native/main.cpp is for every
x86-64 and chooses among them when it runs. No OpenMP is linked: library.py hands over the one that torch has brought.
"""

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

NATIVE: Final = Path(__file__).resolve().parent / "native"

#: Where an installation has the library. Everything in it was made, nothing is kept in the repository.
COMPILED: Final = Path(__file__).resolve().parent / "compiled"

LIBRARY: Final = "libkilburn.so"

#: Kept beside the library, and written last: what it was made of. Its first line is all that is compared with the sources.
STAMP: Final = "made_of.txt"

_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

#: The flags of each instruction set, best last; their order is that of main.cpp's Instructions.
INSTRUCTION_SETS: Final = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
}

#: What a compiler may not know yet (gcc before 10): it is left out then, and main.cpp is told of it where it is there.
_OPTIONAL: Final = "avx512_bf16"

#: No -ffast-math: NaN and infinity are told apart from numbers. No contraction but where the source says so: what is computed
#: does not depend on the compiler's mood. The plain x86-64 first: a -march in $CXX, or of the distribution's own choosing, would
#: have more in every object than it says. A warning is an error where the tests build, not where somebody installs: a later
#: compiler has new ones.
_FLAGS: Final = (
    "-std=c++17", "-O3", "-march=x86-64", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # gcc 12 finds them in its own intrinsics
)  # fmt: skip

#: As needed: nothing of the C++ runtime is used, so the library does not ask for it. What is missing shows here, not at loading.
_LINK_FLAGS: Final = ("-shared", "-static-libgcc", "-Wl,--as-needed", "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now")

_COMPILE_TIMEOUT_S: Final = 600
_ASK_TIMEOUT_S: Final = 30

#: Of a compiler's complaint; the first lines name the cause.
_MAX_COMPLAINT_LINES: Final = 20


class BuildError(Exception):
    """It can't be compiled here: one line for people; below it perhaps the compiler's own."""


@dataclass(frozen=True, slots=True)
class _Compiler:
    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class _Unit:
    """One object: how it is called, its source, and the flags that only it has."""

    name: str
    source: Path
    flags: tuple[str, ...]


def has_sources() -> bool:
    """Tell whether the sources are there; an installation may come without."""
    return (NATIVE / "main.cpp").exists()


def digest() -> str:
    """Return what tells these sources, and how they are compiled, from all others."""
    found = sha256()
    for path in (Path(__file__).resolve(), *sorted(NATIVE.glob("*.h")), *sorted(NATIVE.glob("*.cpp"))):
        data = path.read_bytes()
        found.update(f"{path.name} {len(data)}\n".encode() + data)
    return found.hexdigest()


def build(target: Path, extra_flags: Sequence[str] = (), *, keep_objects: Path | None = None) -> Path:
    """Compile into this folder, and return the library. Nothing is done where the folder has it already.

    `extra_flags` come last, and are handed to the linker too: sanitizers, -Werror. `keep_objects` is a folder for the objects.

    Raises:
        BuildError: see the class.
    """
    compiler = _compiler()
    made_of = "\n".join((digest(), f"compiler: {compiler.version}", f"flags: {shlex.join(extra_flags)}", ""))
    library, stamp = target / LIBRARY, target / STAMP
    if keep_objects is None and library.exists() and _text(stamp) == made_of:
        with suppress(OSError):  # somebody else's tree, perhaps: it is compiled all the same
            os.utime(stamp)  # make compares times
        return library
    with tempfile.TemporaryDirectory(prefix="kilburn-build-") as name:
        objects = keep_objects or Path(name)
        made = _compile(compiler, _units(compiler), objects, tuple(extra_flags))
        linked = Path(name) / LIBRARY
        _run((*compiler.command, *_LINK_FLAGS, *extra_flags, "-o", str(linked), *map(str, made)))
        try:
            _put(linked, target, made_of)
        except OSError as error:
            raise BuildError(f"nothing can be put into {target}: {error.strerror}") from None
    return library


def _put(linked: Path, target: Path, made_of: str) -> None:
    """Put the library in its place. The stamp is gone first and comes last, so that nothing half done is used.

    The library is replaced, not written over: a process that has the old one mapped keeps it.
    """
    target.mkdir(parents=True, exist_ok=True)
    (target / STAMP).unlink(missing_ok=True)
    beside = target / f"{LIBRARY}.{os.getpid()}"
    try:
        beside.write_bytes(linked.read_bytes())
        beside.chmod(0o755)
        beside.replace(target / LIBRARY)
    finally:
        beside.unlink(missing_ok=True)
    (target / STAMP).write_text(made_of, encoding="utf-8")


def _compiler() -> _Compiler:
    """Return the compiler: $CXX, which may have arguments, or `c++`."""
    machine = platform.machine()
    if sys.platform != "linux" or machine.lower() not in ("x86_64", "amd64"):
        raise BuildError(f"the native kernels are for x86-64 under Linux, and this is {machine} under {platform.system()}")
    wanted = os.environ.get("CXX", "")
    try:
        command = tuple(shlex.split(wanted)) or ("c++",)
    except ValueError as error:
        raise BuildError(f"CXX is {wanted!r}, which is no command: {error}") from None
    try:
        asked = subprocess.run(
            (*command, "--version"), capture_output=True, text=True, errors="replace", timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        raise BuildError(f"there is no C++ compiler: {shlex.join(command)} can't be run") from None
    if asked.returncode != 0 or not asked.stdout:
        raise BuildError(f"there is no C++ compiler: {shlex.join(command)} --version fails")
    return _Compiler(command, asked.stdout.splitlines()[0])


def _units(compiler: _Compiler) -> list[_Unit]:
    known = {name: flags for name, flags in INSTRUCTION_SETS.items() if _takes(compiler, flags)}
    unknown = INSTRUCTION_SETS.keys() - known.keys() - {_OPTIONAL}
    if unknown:
        raise BuildError(f"{compiler.version} has no flags for {' and '.join(sorted(unknown))}")
    has = (f"-DKILBURN_HAS_{_OPTIONAL.upper()}",) if _OPTIONAL in known else ()
    units = [_Unit(name, NATIVE / "isa.cpp", (*flags, f"-DKILBURN_ISA={name}")) for name, flags in known.items()]
    return [*units, _Unit("main", NATIVE / "main.cpp", has)]


def _takes(compiler: _Compiler, flags: Sequence[str]) -> bool:
    """Tell whether the compiler knows these flags."""
    command = (*compiler.command, *flags, "-fsyntax-only", "-x", "c++", os.devnull)
    return subprocess.run(command, capture_output=True, timeout=_ASK_TIMEOUT_S, check=False).returncode == 0


def _compile(compiler: _Compiler, units: Sequence[_Unit], objects: Path, extra_flags: tuple[str, ...]) -> list[Path]:
    """Compile all units, as many at once as there are cores, and return their objects."""

    def compile_one(unit: _Unit) -> Path:
        made = objects / f"{unit.name}.o"
        _run((*compiler.command, *_FLAGS, *unit.flags, *extra_flags, "-c", str(unit.source), "-o", str(made)))
        return made

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, units))


def _run(command: Sequence[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} has not ended within {_COMPILE_TIMEOUT_S} s") from None
    except OSError as error:
        raise BuildError(f"{command[0]} can't be run: {error.strerror}") from None
    if ran.returncode != 0:
        complaint = "\n".join(ran.stderr.strip().splitlines()[:_MAX_COMPLAINT_LINES])
        raise BuildError(f"{command[0]} does not take the sources\n{complaint}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
