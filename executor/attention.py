"""The bridge: the function that transformers' models call for attention, and the step that it then belongs to.

Knows transformers' attention interface and one backend; not plans, slots or weights. Two implementations are registered:

    kilburn         writes K and V into the pool and attends through the block tables
    kilburn_probe   computes nothing: hands each call to a recorder (executor/probe.py)

A model knows nothing of either. What a call needs beside its tensors travels in a context variable, because some families
(StableLM) hand no keyword arguments down. The n-th call of a forward pass is layer n of the pool, whatever the model calls
its modules.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn

from kernels.interface import AttentionBackend, AttentionRule

PAGED: Final = "kilburn"
PROBE: Final = "kilburn_probe"

AttentionCall = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
MaskCall = Callable[..., Tensor]

_CALL: Final[ContextVar[AttentionCall]] = ContextVar("kilburn_attention_call")
_MASK: Final[ContextVar[MaskCall]] = ContextVar("kilburn_mask_call")


class PagedStep:
    """One forward pass over one step's rows."""

    def __init__(
        self,
        backend: AttentionBackend[Any],
        prepared: object,
        dtype: torch.dtype,
        rules: tuple[AttentionRule, ...],
        at_layer: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._prepared = prepared
        self._dtype = dtype
        self._rules = rules
        self._at_layer = at_layer
        self._layer = 0

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attend for the next layer. query [1, q_heads, rows, size], key and value likewise; returns [1, rows, q_heads, size]."""
        layer = self._layer
        self._layer += 1
        self._at_layer(layer)
        keys, values = (states[0].transpose(0, 1).to(self._dtype) for states in (key, value))
        self._backend.write_kv(self._prepared, layer, keys, values)
        return self._backend.paged_attention(self._prepared, layer, query[0].transpose(0, 1), self._rules[layer])[None]


@contextmanager
def attention_calls(call: AttentionCall, mask: MaskCall | None = None) -> Iterator[None]:
    """Let `call` answer the models' attention calls inside the block, and `mask` their wishes for masks, where probed."""
    call_token = _CALL.set(call)
    mask_token = _MASK.set(mask or _no_mask)
    try:
        yield
    finally:
        _CALL.reset(call_token)
        _MASK.reset(mask_token)


def register() -> None:
    """Make both implementations known to transformers.

    `kilburn` gets no mask function: transformers then builds no masks at all. `kilburn_probe` gets one, to be asked what its
    masks would show.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: object
) -> tuple[Tensor, None]:
    return _CALL.get()(module, query, key, value, attention_mask, options), None


def _mask(**options: object) -> Tensor:
    return _MASK.get()(**options)


def _no_mask(**options: object) -> Tensor:
    raise AssertionError("masks are built under the probe's name only")
