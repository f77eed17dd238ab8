"""Attention once more: one sequence, one row, one head after the other, in float64, from K and V that lie in a row."""

import math

import numpy as np
import numpy.typing as npt

from kernels.interface import AttentionRule

Floats = npt.NDArray[np.float64]


def attend(queries: Floats, keys: Floats, values: Floats, rule: AttentionRule) -> Floats:
    """Return [rows, q_heads, value_size] for the last rows of one sequence.

    Args:
        queries: [rows, q_heads, key_size].
        keys: [context, kv_heads, key_size]; values likewise.
    """
    rows, q_heads = queries.shape[:2]
    context, kv_heads = keys.shape[:2]
    output = np.zeros((rows, q_heads, values.shape[2]))
    for row in range(rows):
        position = context - rows + row
        first = 0 if rule.window is None else max(0, position - rule.window + 1)
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            scores = [rule.scale * float(queries[row, head] @ keys[token, kv_head]) for token in range(first, position + 1)]
            if rule.softcap is not None:
                scores = [rule.softcap * math.tanh(score / rule.softcap) for score in scores]
            sink = [] if rule.sinks is None else [float(rule.sinks[head])]
            peak = max(scores + sink)
            weights = [math.exp(score - peak) for score in scores]
            total = sum(weights) + sum(math.exp(score - peak) for score in sink)
            for token, weight in zip(range(first, position + 1), weights, strict=True):
                output[row, head] += weight / total * values[token, kv_head]
    return output
