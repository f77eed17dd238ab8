"""Compiles what is compiled: a build hook of the wheel, and `make compile`. Two parts, neither of which needs the other:

    memmgr     its core and scheduler, by mypyc, into memmgr/compiled
    kernels    attention and what goes with it on the CPU, C++, into kernels/cpu/compiled

Where one can't be made (no compiler, no headers of Python, another machine) the package is built without it, and its process says
so when it starts.

    python deploy/compile.py [PART...]      compiles the tree that it lies in; ends with 1 where a part can't be
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT: Final = Path(__file__).resolve().parent.parent

#: The library that all modules lie in; each module is a small one of its own that hands on to it.
_LIBRARY: Final = "memmgr.compiled.native"


class CompileError(Exception):
    """It can't be compiled here: one line for people; below it perhaps the compiler's own."""


class _Part(NamedTuple):
    """`compile` makes its files in the tree at a root and returns them, or raises CompileError; `without` is what is then."""

    compile: Callable[[Path], list[Path]]
    without: str


def compile_memmgr(root: Path) -> list[Path]:
    """Compile memmgr's core and scheduler, and return the files that were made.

    Raises:
        CompileError: see the class.
    """
    # Imported here: where one of them is missing, the rest of the build goes on.
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.errors import BaseError, CCompilerError
    except ImportError as error:
        raise CompileError(f"{error.name} is not installed") from None
    package = root / "memmgr"
    target = package / "compiled"
    known = _alone(target / "sources.py")
    names = [str(path.relative_to(root)) for path in known.sources(package)]
    made_of = known.digest(package)
    with tempfile.TemporaryDirectory(prefix="kilburn-compile-") as name, chdir(root):
        folder = Path(name)
        try:
            options = [f"--cache-dir={folder / 'mypy'}", *names]  # the tree may be read-only until the end
            extensions = mypycify(options, opt_level="3", debug_level="0", group_name=_LIBRARY, target_dir=str(folder / "c"))
        except SystemExit:  # it has said what it found
            raise CompileError("mypyc does not take the sources") from None
        command: Any = Distribution({"name": "memmgr", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "o")
        command.ensure_finalized()
        try:
            command.run()
        except (BaseError, CCompilerError, OSError):  # the compiler has said why
            raise CompileError("a C compiler and Python's headers are needed") from None
        try:
            return _put(folder / "lib" / "memmgr", target, known, made_of)
        except OSError as error:
            raise CompileError(f"nothing can be put into {target}: {error.strerror}") from None


def _put(built: Path, target: Path, known: ModuleType, made_of: str) -> list[Path]:
    """Put what was built in its place; the stamp is gone first and comes last, so that nothing half done is used."""
    (target / known.STAMP).unlink(missing_ok=True)
    for old in target.rglob("*.so"):
        old.unlink()
    made = []
    for path in sorted(built.rglob("*.so")):
        part = path.relative_to(built)
        place = target / (part.name if part.parts[0] == "compiled" else part)
        place.parent.mkdir(exist_ok=True)
        made.append(Path(shutil.move(path, place)))
    stamp = target / known.STAMP
    stamp.write_text(made_of + "\n", encoding="ascii")
    return [*made, stamp]


def compile_kernels(root: Path) -> list[Path]:
    """Compile the native kernels, and return the files that were made.

    Raises:
        CompileError: see the class.
    """
    known = _alone(root / "kernels" / "cpu" / "build.py")
    try:
        library = Path(known.build(known.COMPILED))
    except known.BuildError as error:
        raise CompileError(str(error)) from None
    return [library, library.with_name(known.STAMP)]


def _alone(path: Path) -> ModuleType:
    """Load one file alone: no package of ours need be installed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PARTS: Final = {
    "memmgr": _Part(compile_memmgr, "memmgr will be interpreted, at half its speed"),
    "kernels": _Part(compile_kernels, "attention on the CPU will be plain torch, several times slower"),
}


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook; see the module."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before a wheel is built, and have what was made in it."""
        del version
        made: list[Path] = []
        for name, part in PARTS.items():
            if name == "memmgr" and os.environ.get("KILBURN_INTERPRETED"):
                continue
            try:
                made += part.compile(Path(self.root))
            except CompileError as error:
                self.app.display_warning(f"{part.without}: {error}")
        if made:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"] += [f"/{path.relative_to(self.root)}" for path in made]


def main(names: Sequence[str]) -> int:
    """Compile these parts, or all."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    failed = False
    for name in names or PARTS:
        try:
            PARTS[name].compile(_ROOT)
        except CompileError as error:
            print(f"{PARTS[name].without}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
