"""How far the main thread is, for the thread that tells others; plain values, each written by the main thread alone."""

import enum
from dataclasses import dataclass


class Phase(enum.Enum):
    """What the process is doing."""

    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True)
class Progress:
    """Written by the main thread; a reader sees each value whole, and the values of one moment or of neighbouring ones."""

    phase: Phase = Phase.LOADING
    step: int = 0
    layer: int = 0
    peer: int = 0  # memmgr's incarnation; 0 while it has not welcomed us

    def at_layer(self, layer: int) -> None:
        """Say which layer the step has reached; from 1, so that 0 is before the first."""
        self.layer = layer + 1
