"""Backends by name. Knows which exist; imports one only when it is asked for."""

from typing import Any, Final

from kernels.interface import AttentionBackend

_NOT_YET: Final = ("cpu",)
NAMES: Final = ("auto", "reference", "triton", *_NOT_YET)


class BackendError(ValueError):
    """There is no such backend: one line for people."""


def create(name: str) -> AttentionBackend[Any]:
    """Return the backend of that name; `auto` takes the best one that there is.

    Raises:
        BackendError: see the class.
    """
    if name in _NOT_YET:
        raise BackendError(f"--attention {name} is not part of this version; use reference")
    if name not in NAMES:
        raise BackendError(f"--attention {name}: there is no such backend; one of {', '.join(NAMES)}")
    if name == "triton":
        return _triton()
    from kernels.reference import ReferenceBackend

    return ReferenceBackend()


def _triton() -> AttentionBackend[Any]:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise BackendError("--attention triton: Triton is not installed; `pip install triton`, or use another") from error
    import torch

    from kernels.triton.backend import TritonBackend
    from kernels.triton.common import INTERPRETED

    if not torch.cuda.is_available() and not INTERPRETED.value:
        raise BackendError("--attention triton: there is no NVIDIA GPU that torch can use; use another")
    return TritonBackend()
