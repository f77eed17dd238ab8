"""What a replay saw, for whoever asked for it. Knows nothing of journals or memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Summary:
    """What a replay saw."""

    runs: int = 0  # of memory managers
    killed: int = 0  # of them, all but perhaps the last, that did not say they end
    pools: int = 0
    operations: int = 0
    steps: int = 0
    sequences: int = 0
    preemptions: int = 0
    blocks: int = 0  # of the largest pool
    peak_live: int = 0  # blocks
    evicted_blocks: int = 0
    copied_blocks: int = 0
    checks: int = 0
    bytes: int = 0
    torn_bytes: int = 0  # of an unfinished frame at the end
    ended: bool = False  # the last memory manager said that it ends
    kinds: dict[str, int] = field(default_factory=dict)  # operations of each kind
