"""Attention once more, in float64: one sequence, one row after the other, from K and V that lie in a row. And how far is too far.

Knows numbers; not blocks, tables or backends.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionRule

Floats = npt.NDArray[np.float64]

#: How large `error` may be, for inputs that were rounded to the dtype before the oracle saw them.
LIMITS: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def attend(queries: Floats, keys: Floats, values: Floats, rule: AttentionRule) -> Floats:
    """Return [rows, q_heads, value_size] for the last rows of one sequence.

    Args:
        queries: [rows, q_heads, key_size].
        keys: [context, kv_heads, key_size]; values likewise.
    """
    rows, q_heads, key_size = queries.shape
    context, kv_heads, value_size = values.shape
    output = np.zeros((rows, q_heads, value_size))
    by_head = np.ascontiguousarray(keys.transpose(1, 2, 0)), np.ascontiguousarray(values.transpose(1, 0, 2))
    sinks = None if rule.sinks is None else rule.sinks.double().cpu().numpy().reshape(kv_heads, -1, 1)
    for row in range(rows):
        position = context - rows + row
        seen = slice(0 if rule.window is None else max(0, position - rule.window + 1), position + 1)
        grouped = queries[row].reshape(kv_heads, -1, key_size)  # head h of the row is in group h // (q_heads // kv_heads)
        scores = rule.scale * (grouped @ by_head[0][:, :, seen])  # [kv_heads, group, tokens]
        if rule.softcap is not None:
            scores = rule.softcap * np.tanh(scores / rule.softcap)
        peak = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            peak = np.maximum(peak, sinks)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks - peak)
        output[row] = ((weights / total) @ by_head[1][:, seen]).reshape(q_heads, value_size)
    return output


def error(found: torch.Tensor, expected: Floats) -> float:
    """Return the largest difference, relative to the largest output of its row; NaN where there is one in `found`.

    A row is [heads, size] of one token. An element by itself may be anywhere near zero, by cancellation.
    """
    assert found.shape == expected.shape
    differences = np.abs(found.double().cpu().numpy() - expected).max(axis=(1, 2))
    return float((differences / np.abs(expected).max(axis=(1, 2))).max())
