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
        import triton  # noqa: F401 - comes with torch for CUDA
    except ImportError as error:
        raise BackendError(f"--attention triton can't be used: {error}; install torch for CUDA") from error
    from kernels.triton.backend import TritonBackend

    return TritonBackend()
