"""Backends by name. Knows which exist and which device each is for; imports a backend only when it is asked for."""

from typing import Any, Final

import torch

from kernels.interface import AttentionBackend

_NOT_YET: Final = ("triton", "cpu")
NAMES: Final = ("auto", "reference", *_NOT_YET)


class BackendError(ValueError):
    """There is no such backend, or not on this device: one line for people."""


def create(name: str, device: torch.device) -> AttentionBackend[Any]:
    """Return the backend of that name; `auto` takes the best one for the device.

    Raises:
        BackendError: see the class.
    """
    if name in _NOT_YET:
        raise BackendError(f"--attention {name} is not part of this version; use reference")
    if name not in NAMES:
        raise BackendError(f"--attention {name}: there is no such backend; one of {', '.join(NAMES)}")
    from kernels.reference import ReferenceBackend

    return ReferenceBackend(device)
