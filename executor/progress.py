"""How far the main thread is, for the thread that tells others; plain values, each written by the main thread alone."""

import ctypes
import enum
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """What the process is doing."""

    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True)
class Progress:
    """Written by the main thread; a reader sees each value whole, and the values of one moment or of neighbouring ones."""

    phase: Phase = Phase.LOADING
    step: int = 0
    peer: int = 0  # memmgr's incarnation; 0 while it has not welcomed us
    layer_cell: ctypes.c_int32 = field(default_factory=ctypes.c_int32)  # native code writes it as it goes

    @property
    def layer(self) -> int:
        """Which layer the step has reached; from 1, so that 0 is before the first."""
        return self.layer_cell.value

    def begin(self, step: int) -> None:
        """Say that a step begins."""
        self.layer_cell.value = 0
        self.step = step

    def at_layer(self, layer: int) -> None:
        """Say that a layer has been reached, the first of which is 0."""
        self.layer_cell.value = layer + 1
