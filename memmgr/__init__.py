"""The memory manager: owns every block, table, reference, prefix hash and copy-on-write decision, and each step's batch.

Knows no tensors, no text, no torch.
"""
