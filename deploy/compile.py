"""Compiles memmgr's core and scheduler with mypyc, into memmgr/compiled: a build hook of the wheel, and `make compile`.

Where it can't be done (no C compiler, no headers of Python) the package is built without, and memmgr says so when it starts.

    python deploy/compile.py        compiles the tree that it lies in; ends with 1 where that can't be done
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT: Final = Path(__file__).resolve().parent.parent

#: The library that all modules lie in; each module is a small one of its own that hands on to it.
_LIBRARY: Final = "memmgr.compiled.native"


class CompileError(Exception):
    """It can't be compiled here: one line for people."""


def compile_tree(root: Path) -> list[Path]:
    """Compile, and return the files that were made.

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
    known = _sources(target)
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


def _sources(folder: Path) -> ModuleType:
    """Load memmgr/compiled/sources.py alone: no package of ours need be installed."""
    spec = importlib.util.spec_from_file_location("sources", folder / "sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook; see the module."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before a wheel is built, and have what was made in it."""
        del version
        if os.environ.get("KILBURN_INTERPRETED"):
            return
        try:
            made = compile_tree(Path(self.root))
        except CompileError as error:
            self.app.display_warning(f"memmgr will be interpreted, at half its speed: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [f"/{path.relative_to(self.root)}" for path in made]


if __name__ == "__main__":
    try:
        compile_tree(_ROOT)
    except CompileError as error:
        sys.exit(f"memmgr will be interpreted, at half its speed: {error}")
