"""Finds out what a loaded model does where it calls attention, and whether it can be served, by running it.

Knows models as callables with attention inside; not families. Configurations name the same thing in many ways, and leave things
out; a forward pass does not. Two questions:

- `observe`: how many calls are there, with which heads and sizes, scaled and capped how, seeing which positions?
- `check`: do the numbers through a block table, in chunks and with another sequence beside, equal the model's own? Whatever
  a family does beside attention (a recurrent state, a position bias, mixing along the batch) shows here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from executor.attention import PROBE, attention_calls
from executor.forward import Forward
from kernels.interface import AttentionBackend, AttentionRule, CacheShape, KvCache, LayerShape, StepRows
from kilburn.errors import StartError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens of each of the two sequences that are compared; fewer where the model has no room for as many.
_MOST_TOKENS: Final = 24
_LEAST_TOKENS: Final = 4

#: Ids are taken from the start of the vocabulary, where no family has placeholders for images.
_MAX_ID: Final = 1000

#: Allowed distance between the two ways to compute one row's logits, relative to the row's own spread. In float32 noise is
#: around 1e-6. In half precision single rows may differ much (a mixture's router takes another expert), so the middle row counts.
_TOLERANCE_FLOAT32: Final = 1e-3
_TOLERANCE_HALF: Final = 0.1

#: A model whose logits are all alike (it was made for a test) has no spread to compare with.
_LEAST_SPREAD: Final = 1e-3

#: Arguments of an attention call that change its result in a way that no backend knows.
_UNSERVED_OPTIONS: Final = ("position_bias", "indices", "block_indices", "sinks")


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model's attention calls look like, in their order."""

    layers: tuple[LayerShape, ...]
    rules: tuple[AttentionRule, ...]
    head_rows: int  # rows of the output head


class _Masks:
    """Asks each mask that the model would build what it shows, and hands out a tensor that names the answer.

    The tensor travels through the model to the attention call, as the mask would; its elements are the answer's number.
    A mask that can't be served is a fault only where a layer uses it.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._answers: list[int | StartError | None] = []

    def build(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        device: torch.device | None = None,
        **options: object,
    ) -> Tensor:
        """Stand in for a mask function of transformers."""
        try:
            self._answers.append(self._ask(mask_function))
        except (StartError, TypeError, IndexError, RuntimeError) as error:
            self._answers.append(StartError(f"one of its masks is neither causal nor a sliding window: {error}"))
        return torch.full((1, 1, q_length, kv_length), float(len(self._answers) - 1), device=device)

    def window(self, mask: Tensor) -> int | None:
        """Return the window of the mask that this tensor stands for.

        Raises:
            StartError: no backend computes such a mask.
        """
        answer = self._answers[int(mask.flatten()[0])]
        if isinstance(answer, StartError):
            raise answer
        return answer

    def _ask(self, mask_function: Callable[..., Tensor]) -> int | None:
        """Return how many positions a row sees, None for all before it. The rows asked tell a window from chunks."""
        last = self._length - 1
        windows = {self._seen(mask_function, row) for row in (last, max(0, last - 1), last // 2)}
        bounded = {window for window in windows if window is not None}
        if len(bounded) > 1:
            raise StartError(f"its rows see {sorted(bounded)} positions")
        return bounded.pop() if bounded else None

    def _seen(self, mask_function: Callable[..., Tensor], row: int) -> int | None:
        zero, positions = torch.tensor(0), torch.arange(self._length)
        shown = torch.as_tensor(mask_function(zero, zero, torch.tensor(row), positions)).expand(self._length)
        count = int(shown.sum())
        if not 0 < count <= row + 1 or not bool(shown[row - count + 1 : row + 1].all()):
            raise StartError(f"row {row} sees other positions than the latest")
        return None if count == row + 1 else count


class _Recorder:
    """Answers attention calls with zeros and remembers what they looked like."""

    def __init__(self, masks: _Masks) -> None:
        self._masks = masks
        self.layers: list[LayerShape] = []
        self.rules: list[AttentionRule] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Record one call; see AttentionCall."""
        for option in _UNSERVED_OPTIONS:
            if options.get(option) is not None:
                raise StartError(f"{type(module).__name__} passes {option} to attention, which no backend computes")
        if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise StartError(f"{type(module).__name__} does not attend from each token to the tokens of its own sequence")
        scale = options.get("scaling")
        sinks = options.get("s_aux")
        self.layers.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        self.rules.append(
            AttentionRule(
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=self._window(mask, options),
                softcap=options.get("softcap"),
                sinks=None if sinks is None else sinks.detach().flatten(),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _window(self, mask: Tensor | None, options: dict[str, Any]) -> int | None:
        return options.get("sliding_window") if mask is None else self._masks.window(mask)


@torch.inference_mode()
def observe(model: "PreTrainedModel", context_length: int) -> Observation:
    """Run a few tokens through the model and return how it attends in contexts of at most `context_length` tokens.

    Raises:
        StartError: in a way that can't be served.
    """
    masks = _Masks(context_length)
    recorder = _Recorder(masks)
    ids = _ids(model)[:1]
    with _implementation(model, PROBE), attention_calls(recorder, masks.build):
        logits = _forward(model, ids, _positions(ids))
    if not recorder.layers:
        raise StartError("it does not use the attention interface of transformers")
    return Observation(tuple(recorder.layers), tuple(recorder.rules), logits.shape[-1])


@dataclass(frozen=True, slots=True)
class Trial:
    """Two sequences, and the logits that the model has for them by itself."""

    ids: Tensor  # [2, tokens]
    expected: Tensor  # [2, tokens, head rows] float32
    seen: Observation
    dtype: torch.dtype


@torch.inference_mode()
def expect(model: "PreTrainedModel", seen: Observation) -> Trial:
    """Let the model say what it makes of a few tokens by itself.

    Raises:
        StartError: what it says are no numbers.
    """
    ids = _ids(model)
    with _implementation(model, "eager"):
        expected = _forward(model, ids, _positions(ids))
    if bool(expected.isnan().any()):
        raise StartError(f"its logits are not numbers in {str(model.dtype).removeprefix('torch.')}; give another --dtype")
    return Trial(ids, expected, seen, model.dtype)


@torch.inference_mode()
def check(trial: Trial, backend: AttentionBackend[Any], block_size: int, make: Callable[[KvCache], Forward]) -> None:
    """Compare a way to run the model, through a poisoned little pool, with the model by itself.

    Raises:
        StartError: the numbers differ.
    """
    found = _paged_logits(trial, backend, block_size, make)
    expected = trial.expected
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    distances = (found - expected).norm(dim=-1) / spread.clamp(min=_LEAST_SPREAD)
    if trial.dtype == torch.float32:
        wrong = not bool((distances <= _TOLERANCE_FLOAT32).all())
    else:
        wrong = not bool(distances.flatten().median() <= _TOLERANCE_HALF)
    if wrong:
        raise StartError(
            "its numbers through a block table are not its own: it keeps something that is not keys and values, "
            f"or attends in a way of its own (relative distance {float(distances.max()):.1e})"
        )


def _paged_logits(trial: Trial, backend: AttentionBackend[Any], block_size: int, make: Callable[[KvCache], Forward]) -> Tensor:
    """Return the logits of two sequences, computed in uneven chunks side by side, through blocks in no order."""
    ids, device = trial.ids, trial.ids.device
    shape = CacheShape(trial.seen.layers, block_size, trial.dtype)
    tokens = ids.shape[1]
    each = -(-tokens // block_size)
    frames = torch.full((2 * each + 1, backend.layout(shape).elements), torch.nan, dtype=trial.dtype, device=device)
    forward = make(KvCache(shape, frames))
    tables = torch.arange(2 * each, dtype=torch.int32, device=device).flip(0).reshape(each, 2).T.contiguous()
    logits = ids.new_zeros(*ids.shape, trial.seen.head_rows, dtype=torch.float32)
    starts = (0, 0)
    # One sequence ends with a decode, the other has one in between.
    for ends in ((tokens * 5 // 8, tokens * 3 // 8), (tokens - 1, tokens * 3 // 8 + 1), (tokens, tokens)):
        order = sorted((0, 1), key=lambda sequence: ends[sequence] - starts[sequence] > 1)  # decodes first
        parts = [(sequence, torch.arange(starts[sequence], ends[sequence], device=device)) for sequence in order]
        positions = torch.cat([part for _, part in parts])
        owners = torch.cat([torch.full_like(part, sequence) for sequence, part in parts])
        slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
        rows = StepRows(
            decodes=sum(len(part) == 1 for _, part in parts),
            query_lengths=tuple(len(part) for _, part in parts),
            context_lengths=tuple(ends[sequence] for sequence in order),
            tables=tables[order],
            write_slots=slots,
        )
        logits[owners, positions] = _run(forward, rows, ids[owners, positions], positions)
        starts = ends
    return logits


def most_rows(trial: Trial) -> int:
    """Return how many rows a step of `check` has at most."""
    return trial.ids.numel()


def _run(forward: Forward, rows: StepRows, ids: Tensor, positions: Tensor) -> Tensor:
    with _failing():
        return forward.logits(rows, ids, positions, torch.arange(ids.shape[0], device=ids.device)).float()


@contextmanager
def _implementation(model: "PreTrainedModel", name: str) -> Iterator[None]:
    """Switch the model's attention inside the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _forward(model: "PreTrainedModel", ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of all rows, in float32.

    Raises:
        StartError: the model can't be run like this.
    """
    with _failing():
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits.float()


@contextmanager
def _failing() -> Iterator[None]:
    """Let whatever a model fails with be a StartError."""
    try:
        yield
    except StartError:
        raise
    except Exception as error:
        raise StartError(f"it fails on a few tokens: {type(error).__name__}: {_first_line(error)}") from error


def _ids(model: "PreTrainedModel") -> Tensor:
    """Return two different sequences of ids, [2, tokens].

    Raises:
        StartError: there is no room for them.
    """
    text = model.config.get_text_config(decoder=True)
    tokens = min(_MOST_TOKENS, getattr(text, "max_position_embeddings", None) or _MOST_TOKENS)
    if tokens < _LEAST_TOKENS:
        raise StartError(f"it has room for {tokens} tokens; at least {_LEAST_TOKENS} are needed")
    vocabulary = min(_MAX_ID, text.vocab_size)
    ids: Tensor = (torch.arange(2 * tokens, device=model.device).reshape(2, tokens) * 37 + 11) % vocabulary
    return ids


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
