"""The general path: a model of transformers runs the rows of a step, with the pool behind its attention.

Knows models of transformers, one backend and a pool; not plans, slots or sampling. The fast path is executor/fused.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from executor.attention import PagedStep, attention_calls
from kernels.interface import AttentionBackend, AttentionRule, KvCache, StepRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Forward(Protocol):
    """A decoder over one pool."""

    def logits(self, rows: StepRows, token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Run the rows of one step and return the logits [wanted, head rows] of those wanted; valid until the next call.

        Args:
            rows: where they write and attend.
            token_ids: [rows] int64.
            positions: [rows] int64, of each row in its own sequence.
            wanted: [n] int64, rows; may be none.
        """


class GeneralForward:
    """See the module. `at_layer` is told which layer is under way, from 0."""

    def __init__(
        self,
        model: "PreTrainedModel",
        backend: AttentionBackend[Any],
        cache: KvCache,
        rules: tuple[AttentionRule, ...],
        at_layer: Callable[[int], None],
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._rules = rules
        self._at_layer = at_layer

    @torch.inference_mode()
    def logits(self, rows: StepRows, token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See Forward; of the model's dtype."""
        prepared = self._backend.prepare(self._cache, rows)
        step = PagedStep(self._backend, prepared, self._cache.shape.dtype, self._rules, self._at_layer)
        with attention_calls(step):
            output = self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted)
        logits: Tensor = output.logits[0]
        return logits
