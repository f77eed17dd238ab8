"""The CPU's library: how it is compiled, what is in it, and when it is refused."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kernels.cpu import build, library

ROOT: Final = Path(__file__).parents[2]
CXX: Final = os.environ.get("CXX") or "c++"

pytestmark = pytest.mark.skipif(shutil.which(CXX.split()[0]) is None, reason="needs a C++ compiler")


@pytest.fixture(scope="session")  # once: tests that start processes come after all others
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the objects, compiled with every warning an error."""
    folder = tmp_path_factory.mktemp("objects")
    build.build(folder / "made", ("-Werror",), keep_objects=folder)
    return folder


@pytest.fixture(scope="session")
def made(objects: Path) -> Path:
    return objects / "made"


def asked(code: str, tree: Path = ROOT, **environment: str) -> str:
    """Return what a fresh Python prints that imports the packages of a tree."""
    command = [sys.executable, "-c", code]
    known = os.environ | {"PYTHONPATH": str(tree)} | environment
    return subprocess.run(command, cwd=tree, env=known, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def copied(to: Path) -> Path:
    """Copy what is needed to compile the library and to load it."""
    for name in "kernels", "deploy":
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    return to


def small_library(folder: Path, source: str) -> Path:
    """Compile something else in place of the library, with a stamp that fits."""
    (folder / "small.cpp").write_text(f'extern "C" {{ {source} }}')
    command = [*CXX.split(), "-shared", "-fPIC", "-o", str(folder / build.LIBRARY), str(folder / "small.cpp")]
    subprocess.run(command, check=True, timeout=60)
    (folder / build.STAMP).write_text(build.digest() + "\n")
    return folder


# ------------------------------------------------------------------------------------------------------- how it is compiled


@pytest.mark.parametrize(("compiler", "reason"), [("false", "--version fails"), ("/nowhere/c++ -m64", "can't be run")])
def test_without_a_compiler_it_says_which_it_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=rf"there is no C\+\+ compiler: {re.escape(compiler)} {reason}"):
        build.build(tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("compiler", ["c++ 'unfinished", '"'])
def test_a_compiler_that_is_no_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=f"CXX is {re.escape(repr(compiler))}, which is no command"):
        build.build(tmp_path / "made")


def test_another_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(build.BuildError, match="for x86-64 under Linux, and this is aarch64 under Linux"):
        build.build(tmp_path)


def test_an_installation_goes_on_without(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    command = [sys.executable, "deploy/compile.py", "kernels"]
    ran = subprocess.run(command, cwd=tree, env=os.environ | {"CXX": "false"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line == (
        "attention on the CPU will be plain torch, several times slower: there is no C++ compiler: false --version fails"
    )
    why = asked("from kernels.cpu import library; print(library.why_missing())", tree)
    assert why.startswith("they were not compiled: a C++ compiler has to be there")


def test_a_part_that_there_is_not_is_refused() -> None:
    command = [sys.executable, "deploy/compile.py", "kernel"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (2, "there is no part 'kernel'; there are memmgr, kernels\n")


def test_what_the_compiler_complains_of_is_handed_on_and_what_was_there_stays(made: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    with pytest.raises(build.BuildError, match=r"does not take the sources\n(.|\n)*no-such-flag"):
        build.build(made, ("--no-such-flag",))
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


def test_what_is_there_already_is_not_compiled_again(made: Path) -> None:
    os.utime(made / build.STAMP, (0, 0))
    before = (made / build.LIBRARY).stat().st_mtime_ns
    build.build(made, ("-Werror",))
    assert (made / build.LIBRARY).stat().st_mtime_ns == before
    assert (made / build.STAMP).stat().st_mtime > 0  # or make would try again each time


def test_it_may_be_there_in_a_tree_of_somebody_else(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)
    assert build.build(made, ("-Werror",)) == made / build.LIBRARY


def test_a_compiler_for_a_newer_machine_does_not_get_its_way() -> None:
    command = [*CXX.split(), "-march=x86-64-v3", *build._FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "__SSE2__" in macros
    assert "__AVX" not in macros


def test_build_imports_neither_torch_nor_ours() -> None:
    code = f"import runpy, sys; runpy.run_path({build.__file__!r}); print({{'torch', 'kernels'}} & set(sys.modules))"
    assert asked(code) == "set()"


@pytest.mark.processes
def test_a_compiler_that_does_not_know_an_instruction_set_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = tmp_path / "older"
    older.write_text(f'#!/bin/sh\ncase "$*" in *avx512bf16*) exit 1;; esac\nexec {CXX} "$@"\n')
    older.chmod(0o755)
    monkeypatch.setenv("CXX", str(older))
    build.build(tmp_path / "made")
    assert library.load_from(tmp_path / "made").supported.keys() == set(expected_instructions()) - {"avx512_bf16"}


@pytest.mark.processes
def test_a_wheel_has_the_library(tmp_path: Path) -> None:
    for name in "kilburn", "kernels", "executor", "gateway", "cli", "deploy":
        # The kernels with what was compiled of them: it is found to be of these sources, and taken.
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "memmgr", tmp_path / "memmgr", ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    shutil.copytree(ROOT / "memmgr/compiled", tmp_path / "memmgr/compiled", ignore=shutil.ignore_patterns("*.so"))
    for name in "pyproject.toml", "README.md", ".gitignore":
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"KILBURN_INTERPRETED": "1"}, check=True, capture_output=True, timeout=240
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "x86_64" in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {f"kernels/cpu/compiled/{name}" for name in (build.LIBRARY, build.STAMP)} <= names
    assert "kernels/cpu/build.py" in names


# ---------------------------------------------------------------------------------------------------------- what is in it


@pytest.mark.parametrize("name", build.INSTRUCTION_SETS)
def test_no_symbol_of_an_instruction_set_can_be_taken_for_another_one(objects: Path, name: str) -> None:
    """Of equal weak symbols the linker keeps any one: an older machine would end with an illegal instruction."""
    listed = subprocess.run(
        ["nm", "--demangle", "--format=posix", str(objects / f"{name}.o")], capture_output=True, text=True, check=True, timeout=60
    )
    defined = [re.fullmatch(r"(.*) ([A-Za-z])( [0-9a-f]+)*\s*", line) for line in listed.stdout.splitlines()]
    shared = [found[1] for found in defined if found and found[2] in "TDBRVWvwu"]
    assert shared, "nothing is defined: is this the right file?"
    strange = [symbol for symbol in shared if not re.search(rf"(^| ){name}::", symbol)]
    assert not strange


def test_it_needs_nothing_but_the_c_library(made: Path) -> None:
    listed = subprocess.run(["readelf", "-d", str(made / build.LIBRARY)], capture_output=True, text=True, check=True, timeout=60)
    assert set(re.findall(r"NEEDED.*\[(.*)\]", listed.stdout)) <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def test_it_shows_its_entries_only_and_each_is_used(made: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(made / build.LIBRARY)], capture_output=True, text=True, check=True, timeout=60
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert names == set(re.findall(r'"(kilburn_\w+)"', Path(library.__file__).read_text()))


def abi_structures() -> Iterator[tuple[str, list[str]]]:
    """Yield the structures of native/abi.h that Python fills, and the names of their fields."""
    text = re.sub(r"//.*", "", (build.NATIVE / "abi.h").read_text())
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, flags=re.DOTALL):
        if "(*" not in body:  # those of functions stay on the other side
            yield name, re.findall(r"(\w+);", body)


def test_python_has_the_same_structures() -> None:
    there = dict(abi_structures())
    here = {structure.__name__: [field[0] for field in structure._fields_] for structure in library.STRUCTURES}
    assert here == there


# --------------------------------------------------------------------------------------------------- when it is refused


def test_the_installation_has_it() -> None:
    assert library.why_missing() == ""
    assert library.load() is library.load()


def expected_instructions() -> tuple[str, ...]:
    flags = set(re.findall(r"\w+", re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)[0]))
    needed = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512_bf16"},
    }
    return tuple(name for name in build.INSTRUCTION_SETS if needed[name] <= flags)


def test_the_instruction_sets_are_those_of_this_machine() -> None:
    assert library.instructions() == expected_instructions()


def test_the_best_instruction_set_is_chosen_and_no_unknown_one() -> None:
    here = library.load()
    assert here.choose(None) == library.instructions()[-1]
    assert here.choose("avx2") == "avx2"
    assert here.number("avx2") == 0
    with pytest.raises(library.LibraryError, match="sse2 can't be used here; there is avx2"):
        here.choose("sse2")


def test_one_without_a_stamp_is_refused(tmp_path: Path, made: Path) -> None:
    shutil.copy(made / build.LIBRARY, tmp_path)
    with pytest.raises(library.LibraryError, match="they were not compiled"):
        library.load_from(tmp_path)


@pytest.mark.processes
def test_one_of_other_sources_is_refused(tmp_path: Path, made: Path) -> None:
    tree = copied(tmp_path)
    shutil.copytree(made, tree / "kernels/cpu/compiled")
    code = "from kernels.cpu import library; print(library.why_missing())"
    assert asked(code, tree) == ""
    with (tree / "kernels/cpu/native/abi.h").open("a") as source:
        source.write("// another line\n")
    assert asked(code, tree) == "their sources have changed since they were compiled: run `make compile`"
    shutil.rmtree(tree / "kernels/cpu/native")  # an installation without sources believes the library
    assert asked(code, tree) == ""


def test_one_of_another_abi_is_refused(tmp_path: Path) -> None:
    small_library(tmp_path, "int kilburn_abi() { return 1234; }")
    with pytest.raises(library.LibraryError, match=rf"speaks version 1234, this package {library.ABI}: run `make compile`"):
        library.load_from(tmp_path)


def test_one_with_other_structures_is_refused(tmp_path: Path) -> None:
    source = f"int kilburn_abi() {{ return {library.ABI}; }} long kilburn_sizeof(int) {{ return 8; }}"
    small_library(tmp_path, source)
    size = ctypes.sizeof(library.Layer)
    with pytest.raises(library.LibraryError, match=rf"has structures of \[8, 8, .*\] bytes, this package of \[{size}, "):
        library.load_from(tmp_path)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / build.LIBRARY).write_bytes(b"nothing")
    (tmp_path / build.STAMP).write_text(build.digest() + "\n")
    with pytest.raises(library.LibraryError, match="can't be loaded"):
        library.load_from(tmp_path)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99, 0.9999])
def test_one_that_is_cut_short_is_refused(tmp_path: Path, made: Path, part: float) -> None:
    data = (made / build.LIBRARY).read_bytes()
    (tmp_path / build.LIBRARY).write_bytes(data[: int(part * len(data))])
    shutil.copy(made / build.STAMP, tmp_path)
    with pytest.raises(library.LibraryError, match="is cut short: run `make compile`"):
        library.load_from(tmp_path)


def test_some_other_library_is_refused(tmp_path: Path) -> None:
    small_library(tmp_path, "int somebody_else() { return 1; }")
    with pytest.raises(library.LibraryError, match="is some other library"):
        library.load_from(tmp_path)


@pytest.mark.processes
def test_it_loads_from_a_folder_whose_name_is_not_utf8(tmp_path: Path, made: Path) -> None:
    folder = tmp_path / os.fsdecode(b"l\xe9")
    shutil.copytree(made, folder)
    load = f"load_from(Path({str(folder)!r}))"
    code = f"from pathlib import Path; from kernels.cpu.library import load_from; print({load}.why_one_thread)"
    assert asked(code) == ""


# -------------------------------------------------------------------------------------------------------------- its threads

RUNTIMES: Final = """
import re
from pathlib import Path
from kernels.cpu import library
found = library.load()
import torch
torch.ones(300, 300) @ torch.ones(300, 300)
files = set(re.findall(r"/\\S*lib(?:g|i)?omp\\S*", Path("/proc/self/maps").read_text()))
print(len(files), files == {str(found.openmp)}, found.why_one_thread)
"""


def test_its_threads_are_those_of_torch_and_there_are_no_others() -> None:
    assert asked(RUNTIMES) == "1 True"
