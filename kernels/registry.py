"""Backends by name. Knows which exist and on which devices they work; imports one only when it is asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kernels.interface import AttentionBackend

if TYPE_CHECKING:
    from kernels.cpu.backend import CpuBackend

NAMES: Final = ("auto", "triton", "cpu", "reference")

#: The kinds of devices that a backend works on, where it does not work on all.
_WORKS_ON: Final = {"triton": "cuda", "cpu": "cpu"}


class BackendError(ValueError):
    """There is no such backend, or it can't be used here: one line for people."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why attention is slower than it could be on this device: one line; empty where it is not."""

    backend: AttentionBackend[Any]
    why_slower: str = ""
    instructions: str = ""  # of a CPU's


def choose(name: str, device: torch.device) -> Choice:
    """Return the backend of that name for a device; `auto` takes the best one that can be had.

    Raises:
        BackendError: see the class. Not for `auto`: the reference always works.
    """
    if name != "auto":
        if device.type != _WORKS_ON.get(name, device.type):
            raise BackendError(_why_not_on(name, device))
        return _chosen(name)
    best = "triton" if device.type == "cuda" else "cpu"
    try:
        return _chosen(best)
    except BackendError as error:
        return Choice(create("reference"), f"{error}; until then attention is plain torch, several times slower")


def create(name: str) -> AttentionBackend[Any]:
    """Return the backend of that name, which is not `auto`.

    Raises:
        BackendError: see the class.
    """
    if name == "triton":
        return _triton()
    if name == "cpu":
        return _cpu()
    if name != "reference":
        raise BackendError(f"--attention {name}: there is no such backend; one of {', '.join(NAMES)}")
    from kernels.reference import ReferenceBackend

    return ReferenceBackend()


def _why_not_on(name: str, device: torch.device) -> str:
    """Return why a backend does not work on a device, and what to do."""
    needs = {"cuda": "an NVIDIA GPU", "cpu": "a CPU"}[_WORKS_ON[name]]
    why = f"--attention {name} needs {needs}, and the device is {device}; leave --attention out for the best that works here"
    if _WORKS_ON[name] == "cuda" and not torch.cuda.is_available():
        why += f". If there is a GPU, torch {torch.__version__} does not find it: see nvidia-smi, and install torch for CUDA"
    return why


def _chosen(name: str) -> Choice:
    if name != "cpu":
        return Choice(create(name))
    backend = _cpu()
    from kernels.cpu.library import load

    why = load().why_one_thread
    return Choice(backend, f"the native kernels have one thread only: {why}" if why else "", backend.instructions)


def _triton() -> AttentionBackend[Any]:
    try:
        import triton  # noqa: F401 - comes with torch for CUDA
    except ImportError as error:
        raise BackendError(f"the Triton kernels can't be used: {error}; install torch for CUDA") from error
    from kernels.triton.backend import TritonBackend

    return TritonBackend()


def _cpu() -> "CpuBackend":
    from kernels.cpu.library import why_missing

    why = why_missing()
    if why:
        raise BackendError(f"the native kernels for CPUs can't be used: {why}")
    from kernels.cpu.backend import CpuBackend

    return CpuBackend()
