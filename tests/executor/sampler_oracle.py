"""The sampler once more: one row and token after the other, in Python integers and float64, without any of its tricks."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from executor.sampler import Draw

Floats = npt.NDArray[np.float64]

DOMAIN = 0x4B494C42


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four words; Python's integers don't wrap."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def changed(
    logits: Sequence[float],
    prompt: Collection[int],
    outputs: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    unwanted: Collection[int] = (),
) -> list[float]:
    """Return what bias, penalties and ends that come too early make of one row."""
    found = []
    for token, logit in enumerate(logits):
        logit += (bias or {}).get(token, 0.0)
        if token in prompt or token in outputs:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * outputs.count(token)
        if token in outputs:
            logit -= presence
        if token in unwanted and len(outputs) < min_tokens:
            logit = -math.inf
        found.append(logit)
    return found


def kept(logits: Floats, draw: Draw) -> tuple[npt.NDArray[np.bool_], float]:
    """Return which tokens the filters leave, and how close top-p or min-p came to deciding otherwise."""
    sampling = draw.sampling
    tempered = (logits - logits.max()) / sampling.temperature
    keep = np.isfinite(tempered)
    if 0 < sampling.top_k < len(logits):
        keep &= tempered >= np.sort(tempered)[-sampling.top_k]
    margin = 1.0
    if sampling.top_p < 1:
        mass = np.where(keep, np.exp(tempered), 0.0)
        mass /= mass.sum()
        least = math.inf
        before = 0.0
        for token in np.argsort(-tempered, kind="stable"):
            if before >= sampling.top_p:
                break
            margin = min(margin, sampling.top_p - before)
            least = tempered[token]
            before += mass[token]
        margin = min(margin, before - sampling.top_p)
        keep &= tempered >= least
    weights = np.exp(tempered)
    if sampling.min_p > 0 and (below := tempered < 0).any():
        margin = min(margin, np.abs(weights[below] - sampling.min_p).min())
    keep &= weights >= sampling.min_p
    return keep, margin


def sums(logits: Floats, draw: Draw) -> Floats:
    """Return logit over temperature plus noise for each token that is left, -inf for the others."""
    sampling = draw.sampling
    keep, _ = kept(logits, draw)
    tempered = (logits - logits.max()) / sampling.temperature
    key = (sampling.seed % 2**32, sampling.seed // 2**32)
    found = np.full(len(logits), -math.inf)
    for token in np.flatnonzero(keep):
        word = philox((int(token) // 4, draw.position, draw.index, DOMAIN), key)[int(token) % 4]
        uniform = (word + 0.5) / 2**32
        found[token] = tempered[token] - math.log(-math.log(uniform))
    return found
