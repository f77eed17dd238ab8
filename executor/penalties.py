"""What changes logits before a token is chosen from them: a bias, penalties for what was there before, ends that come too early.

The order is that of vLLM and transformers; temperature and the filters come after it (sampler.py):

    bias         logit + bias
    repetition   logit / penalty where it is positive, else logit * penalty, of each token in the prompt or the outputs, once
    frequency    logit - penalty * times that it was output
    presence     logit - penalty, of each token that was output
    ends         -inf, of each token that would end the sequence before it has `min_tokens` outputs

The logits are changed in place, where a row's own tokens are and nowhere else, so the cost grows with the tokens that a row has
had, not with the vocabulary, and a row that asks for nothing costs nothing. `Changed.undo` puts back what was there: what is told
of a token is told of the model's own distribution.

Knows rows of logits, and the messages that say how they are to be changed; not slots, plans or how a token is chosen.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.errors import PlanError
from kilburn.limits import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from kilburn.v1 import engine_pb2 as wire

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_FIRST_CAPACITY: Final = 64

#: Where a penalty would make a logit infinite it stays the largest number that there is, so that its row is still one of numbers.
_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What one request asks for; see the module."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: Ints | None = None  # distinct
    bias: Floats | None = None  # of each of them
    min_tokens: int = 0
    unwanted_ids: Ints | None = None  # distinct

    @property
    def counts_tokens(self) -> bool:
        """Whether a History is needed."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


class History:
    """The distinct tokens of one sequence, in the order in which they came, and how often each was output.

    Args:
        prompt_ids: distinct.
        output_ids: distinct.
        output_counts: one for each of them.
    """

    def __init__(self, prompt_ids: Ints, output_ids: Ints, output_counts: Ints) -> None:
        only_prompt = np.setdiff1d(prompt_ids, output_ids, assume_unique=True)
        self._size = len(only_prompt) + len(output_ids)
        capacity = max(_FIRST_CAPACITY, 2 * self._size)
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: self._size] = np.concatenate((only_prompt, output_ids))
        self._counts[len(only_prompt) : self._size] = output_counts
        self._places = dict(zip(self._ids[: self._size].tolist(), range(self._size), strict=True))

    @property
    def ids(self) -> Ints:
        """The tokens; valid until the next one is added."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Floats:
        """Of each of `ids`, how often it was output; whole numbers up to 2^24, more than any context."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count a token that was output."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits that is to be changed. `position`: the number of the output that is chosen from it, from 0."""

    row: int
    changes: Changes
    position: int
    history: History | None


class Changed:
    """Rows of logits that were changed in place."""

    __slots__ = ("_before", "_logits")

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    def take(self, parts: Sequence[tuple[int, Ints]]) -> tuple[Tensor, Tensor]:
        """Return what stands at some places, [n], and which of the parts each belongs to; they are put back by `undo`.

        Args:
            parts: (row, distinct tokens).
        """
        lengths = [len(ids) for _, ids in parts]
        which = np.repeat(np.arange(len(parts)), lengths)
        rows = self._tensor(np.array([row for row, _ in parts], dtype=np.int64)[which])
        ids = self._tensor(np.concatenate([ids for _, ids in parts]))
        values = self._logits[rows, ids]
        self._before.append((rows, ids, values))
        return values, self._tensor(which)

    def put(self, values: Tensor) -> None:
        """Write to the places that were taken last."""
        rows, ids, _ = self._before[-1]
        self._logits[rows, ids] = values

    def undo(self) -> None:
        """Put everything back, the last change first: one place may have been changed several times."""
        while self._before:
            rows, ids, values = self._before.pop()
            self._logits[rows, ids] = values

    def _tensor(self, array: "Ints | Floats") -> Tensor:
        return torch.from_numpy(array).to(self._logits.device)


def change(logits: Tensor, rows: Sequence[Row]) -> Changed:
    """Change some rows in place, as the module says.

    Args:
        logits: [any, vocabulary] float32.
        rows: at most one for each of its rows.
    """
    changed = Changed(logits)
    _add_bias(changed, [row for row in rows if row.changes.bias_ids is not None])
    _penalize(changed, [row for row in rows if row.history is not None and len(row.history.ids)])
    ending = [(row.row, ids) for row in rows if (ids := hidden_ids(row.changes, row.position)) is not None]
    if ending:
        values, _ = changed.take(ending)
        changed.put(torch.full_like(values, -math.inf))
    return changed


def hidden_ids(changes: Changes | None, position: int) -> Ints | None:
    """Return the tokens that may not be output number `position`, None where there are none."""
    return None if changes is None or position >= changes.min_tokens else changes.unwanted_ids


def _add_bias(changed: Changed, rows: Sequence[Row]) -> None:
    if not rows:
        return
    values, _ = changed.take([(row.row, row.changes.bias_ids) for row in rows if row.changes.bias_ids is not None])
    bias = np.concatenate([row.changes.bias for row in rows if row.changes.bias is not None])
    changed.put(values + torch.from_numpy(bias).to(values.device))


def _penalize(changed: Changed, rows: Sequence[Row]) -> None:
    histories = [(row, row.history) for row in rows if row.history is not None]
    if not histories:
        return
    values, which = changed.take([(row.row, history.ids) for row, history in histories])
    counts = torch.from_numpy(np.concatenate([history.counts for _, history in histories])).to(values.device)

    def each(numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.float32, device=values.device)[which]

    repetition = each(row.changes.repetition for row, _ in histories)
    repeated = torch.where(values > 0, values / repetition, values * repetition).clamp(-_LARGEST, _LARGEST)
    values = torch.where(values.isinf(), values, repeated)
    values = values - each(row.changes.frequency for row, _ in histories) * counts
    changed.put(values - each(row.changes.presence for row, _ in histories) * (counts > 0))


# ------------------------------------------------------------------------------------------------------------- messages


def read_changes(params: wire.SamplingParams, vocab_size: int) -> Changes | None:
    """Return what a request's parameters change, None where they change nothing.

    Raises:
        PlanError: one is out of its range.
    """
    repetition = params.repetition_penalty or 1.0
    bias = params.logit_bias
    numbers = (repetition, params.presence_penalty, params.frequency_penalty, *bias.values())
    if not all(map(math.isfinite, numbers)) or repetition <= 0 or len(bias) > MAX_LOGIT_BIASES:
        raise PlanError("penalties or a logit bias out of range")
    if len(params.unwanted_ids) > MAX_STOP_TOKEN_IDS:
        raise PlanError(f"{len(params.unwanted_ids)} tokens are unwanted; at most {MAX_STOP_TOKEN_IDS}")
    if max((*bias, *params.unwanted_ids), default=0) >= vocab_size:
        raise PlanError(f"a bias for, or a ban on, a token that is not of the vocabulary of {vocab_size}")
    unwanted = np.unique(np.array(params.unwanted_ids, dtype=np.int64)) if params.min_tokens else np.empty(0, dtype=np.int64)
    changes = Changes(
        repetition=repetition,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias_ids=np.array(list(bias.keys()), dtype=np.int64) if bias else None,
        bias=np.array(list(bias.values()), dtype=np.float32) if bias else None,
        min_tokens=params.min_tokens,
        unwanted_ids=unwanted if len(unwanted) else None,
    )
    is_neutral = not changes.counts_tokens and changes.bias is None and changes.unwanted_ids is None
    return None if is_neutral else changes


def read_history(message: wire.History, vocab_size: int) -> History:
    """Return a sequence's tokens as its slot opens.

    Raises:
        PlanError: it names a token that is not of the vocabulary, or contradicts itself.
    """
    prompt_ids = np.flatnonzero(np.unpackbits(np.frombuffer(message.prompt_seen, dtype=np.uint8), bitorder="little"))
    gaps = np.array(message.output_gaps, dtype=np.int64)
    counts = np.array(message.output_counts, dtype=np.int64)
    output_ids = gaps.cumsum()
    if len(gaps) != len(counts) or (counts < 1).any() or (gaps[1:] < 1).any():
        raise PlanError(f"the history of slot {message.slot} contradicts itself")
    if max(prompt_ids.max(initial=0), output_ids.max(initial=0)) >= vocab_size:
        raise PlanError(f"the history of slot {message.slot} has a token that is not of the vocabulary of {vocab_size}")
    return History(prompt_ids.astype(np.int64), output_ids, counts)
