"""The memory manager: owns every block, table, reference, prefix hash and copy-on-write decision, and each step's batch.

Knows no tensors, no text, no torch. Its core and scheduler are compiled where that was possible; see `compiled`.
"""

from memmgr import compiled

compiled.use()
