"""The backends that the tests run, by names that say on what: instruction sets, the interpreter, a GPU.

Knows what makes each of them available, and that a library which should be there is: else its tests fail, they do not skip.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from kernels.interface import AttentionBackend
from kernels.reference import ReferenceBackend

CPU: Final = ("cpu-avx2", "cpu-avx512", "cpu-avx512_bf16")
NATIVE: Final = ("reference", *CPU)
ALL: Final = (*NATIVE, "triton-interpreted", "triton-gpu")


@dataclass(frozen=True)
class Subject:
    """A backend, and where its tensors have to be."""

    backend: AttentionBackend[Any]
    device: str = "cpu"


def parameters(names: Sequence[str] = ALL) -> list[Any]:
    """Return the names as pytest's parameters, for the fixture `subject`."""
    return [pytest.param(name, marks=[pytest.mark.gpu] if name == "triton-gpu" else []) for name in names]


def make(name: str) -> Subject:
    """Return the backend of that name; the test is skipped where this machine can't have it."""
    kind, _, variant = name.partition("-")
    if kind == "cpu":
        return _cpu(variant)
    if kind == "triton":
        return _triton(variant)
    return Subject(ReferenceBackend())


def need_cpu_library() -> None:
    """Skip the test where there is no compiler that could have made the library."""
    from kernels.cpu import library

    why = library.why_missing()
    if why:
        compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
        if shutil.which(compiler):
            pytest.fail(f"there is a compiler, {compiler}, but no library: {why}")
        pytest.skip(why)


def need_triton() -> None:
    """Skip the test where Triton is not installed: torch brings it for CUDA only."""
    pytest.importorskip("triton")


def _cpu(instructions: str) -> Subject:
    need_cpu_library()
    from kernels.cpu import library
    from kernels.cpu.backend import CpuBackend

    if instructions not in library.instructions():
        pytest.skip(f"this machine has no {instructions}")
    return Subject(CpuBackend(instructions))


def _triton(variant: str) -> Subject:
    gpu = torch.cuda.is_available()
    if variant == "gpu" and not gpu:
        pytest.skip("there is no NVIDIA GPU")
    if variant == "interpreted" and gpu:
        pytest.skip("there is a GPU, and Triton runs either on it or in the interpreter")
    need_triton()
    from kernels.triton.backend import TritonBackend
    from kernels.triton.common import INTERPRETED

    assert bool(INTERPRETED.value) != gpu, "Triton was imported before tests/kernels/conftest.py could tell it to interpret"
    return Subject(TritonBackend(), "cuda" if gpu else "cpu")
