"""The general path's products on the CPU, by the kernels' packed weights: the modules of a model of transformers are exchanged.

Knows torch's modules and the kernels; not what a model does with them. A product of few rows reads its weight at twice the speed
that way (docs/decisions.md), and a row's numbers are the same bit for bit, whatever rows it comes with. What is exchanged can be
put back, from the packed weights alone: a model may do with a module's weight what no exchange can know.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from kernels.cpu.operations import Operations, PackedWeight, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES: Final = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Stands for an nn.Linear, or for a Conv1D of transformers, which is one with its weight transposed."""

    bias: Tensor | None

    def __init__(self, operations: Operations, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self._operations = operations
        self.packed = weight
        # Buffers, so that they count where a model says what it takes.
        self.register_buffer("blocks", weight.blocks, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows [..., inner] times weight plus bias, as [..., outputs]."""
        flat = rows.reshape(-1, self.packed.inner)
        if not flat.shape[0]:
            return rows.new_empty(*rows.shape[:-1], self.packed.outputs)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        return self._operations.linear(flat, self.packed, self.bias).view(*rows.shape[:-1], self.packed.outputs)


class PackedEmbedding(nn.Module):
    """Stands for an nn.Embedding whose weight is the head's as well: rows are looked up in the head's packed weight."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self._packed = head.packed

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows [..., inner] for ids [...]."""
        return self._packed.rows(ids.flatten()).view(*ids.shape, self._packed.inner)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One place in a model, and what was there, whose weight is gone."""

    parent: nn.Module
    name: str
    was: Any
    packed: PackedWeight
    transposed: bool


class Exchanged:
    """What `exchange` has done to a model."""

    def __init__(self, made: list[_Exchange]) -> None:
        self._made = made

    def __len__(self) -> int:
        return len(self._made)

    @torch.inference_mode()
    def undo(self) -> None:
        """Put all modules back, with their weights."""
        weights: dict[int, nn.Parameter] = {}  # an embedding and its head share one again
        for one in self._made:
            key = id(one.packed)
            if key not in weights:
                whole = one.packed.rows(torch.arange(one.packed.outputs))
                weights[key] = nn.Parameter((whole.T if one.transposed else whole).contiguous(), requires_grad=False)
            one.was.weight = weights[key]
            setattr(one.parent, one.name, one.was)


@torch.inference_mode()
def exchange(model: "PreTrainedModel", instructions: str) -> Exchanged:
    """Exchange a model's products, one by one, each weight let go of as it is packed.

    A weight that several modules have stays as it is, but for a plain embedding's that is the head's.

    Args:
        model: on the CPU.
        instructions: the instruction set to compute with.
    """
    from transformers.pytorch_utils import Conv1D

    operations = Operations(instructions)
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values() if weight is not None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = type(head) is nn.Linear and type(embedding) is nn.Embedding and head.weight is embedding.weight
    made: list[_Exchange] = []
    places: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child) for parent in model.modules() for name, child in parent._modules.items()
    ]
    seats = Counter(id(child) for _, _, child in places)
    packed_head: PackedLinear | None = None
    for parent, name, child in places:
        if type(child) not in (nn.Linear, Conv1D) or seats[id(child)] != 1 or child.weight.dtype not in _DTYPES:
            continue
        if type(child.weight) is not nn.Parameter or child._forward_hooks or child._forward_pre_hooks:
            continue  # a part of a weight, or a module that does more than its product
        is_tied = tied and child is head and uses[id(child.weight)] == 2
        if not is_tied and uses[id(child.weight)] != 1:
            continue
        transposed = type(child) is Conv1D
        weight = pack(child.weight.T if transposed else child.weight)
        linear = PackedLinear(operations, weight, None if child.bias is None else child.bias.detach())
        child.weight = None
        setattr(parent, name, linear)
        made.append(_Exchange(parent, name, child, weight, transposed))
        if is_tied:
            packed_head = linear
    if packed_head is not None:
        for parent, name, child in places:
            if child is embedding:
                child.weight = None
                setattr(parent, name, PackedEmbedding(packed_head))
                made.append(_Exchange(parent, name, child, packed_head.packed, transposed=False))
    return Exchanged(made)
