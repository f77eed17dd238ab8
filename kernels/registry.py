"""Backends by name. Knows which exist; imports one only when it is asked for."""

from typing import Any, Final

from kernels.interface import AttentionBackend

_NOT_YET: Final = ("triton", "cpu")
NAMES: Final = ("auto", "reference", *_NOT_YET)


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
    from kernels.reference import ReferenceBackend

    return ReferenceBackend()
