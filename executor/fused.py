"""The fast path on the CPU: a decoder's whole forward pass as one program of the native kernels.

Knows recipes (executor/recipe.py) and the kernels; not transformers, plans or sampling. Weights are packed once, q, k and v as
one, gate and up as one; norms take the residual along; keys turn on their way to their slots. Values are rounded where
transformers' modules round theirs.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from executor.recipe import Linear, Norm, Recipe
from kernels.cpu.backend import CpuBackend
from kernels.cpu.operations import PackedWeight, pack
from kernels.cpu.program import Program
from kernels.interface import AttentionRule, KvCache, StepRows

#: Buffers for logits have room for at least so many rows; they are made anew, twice as large, where a step wants more.
_FEWEST_LOGITS: Final = 8


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A product as the kernels want it."""

    weight: PackedWeight
    bias: Tensor | None

    @staticmethod
    def of(linear: Linear) -> "PackedLinear":
        """Pack it."""
        return PackedLinear(pack(linear.weight), linear.bias)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's weights; see executor/recipe.py for the words."""

    before_attention: Norm
    qkv: PackedLinear
    q_norm: Norm | None
    k_norm: Norm | None
    turns: bool
    out: PackedLinear
    before_mlp: Norm
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """A decoder's weights, packed. Where the head is the embedding as well, there is one of them."""

    layers: tuple[FusedLayer, ...]
    q_heads: int
    embedding: Tensor | None  # [vocabulary, hidden]
    head: PackedLinear
    last_norm: Norm
    cosines: Tensor  # [positions, rotary / 2]
    sines: Tensor

    @property
    def hidden(self) -> int:
        """The width of a row between layers."""
        return self.head.weight.inner

    @property
    def bytes(self) -> int:
        """What all of it takes."""
        tensors = [self.cosines, self.sines, self.last_norm.weight, self.head.weight.blocks]
        tensors += [] if self.embedding is None else [self.embedding]
        for layer in self.layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                tensors += [linear.weight.blocks, *([] if linear.bias is None else [linear.bias])]
        return sum(tensor.nbytes for tensor in tensors)


@torch.inference_mode()
def pack_all(recipe: Recipe) -> FusedWeights:
    """Pack a recipe's weights, layer by layer, letting go of each as it is packed."""
    layers = tuple(
        FusedLayer(
            before_attention=layer.before_attention,
            qkv=PackedLinear.of(layer.qkv),
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            turns=layer.turns,
            out=PackedLinear.of(layer.out),
            before_mlp=layer.before_mlp,
            gate_up=PackedLinear.of(layer.gate_up),
            down=PackedLinear.of(layer.down),
        )
        for layer in recipe.layers
    )
    return FusedWeights(
        layers=layers,
        q_heads=recipe.q_heads,
        embedding=None if recipe.tied else recipe.embedding.detach(),
        head=PackedLinear.of(recipe.head),
        last_norm=recipe.last_norm,
        cosines=recipe.cosines,
        sines=recipe.sines,
    )


class FusedForward:
    """See the module. Used by one thread, that which calls torch.

    Args:
        weights: of the decoder.
        backend: that attends.
        cache: the pool.
        rules: of each layer's attention.
        most_rows: how many rows a step may have.
        layer: told which layer is under way, from 1.
    """

    def __init__(
        self,
        weights: FusedWeights,
        backend: CpuBackend,
        cache: KvCache,
        rules: tuple[AttentionRule, ...],
        most_rows: int,
        layer: ctypes.c_int32,
    ) -> None:
        self._weights = weights
        self._backend = backend
        self._cache = cache
        self._layer = layer
        program = Program(backend, cache, most_rows, layer)
        self._residual, self._normed = program.buffer(weights.hidden), program.buffer(weights.hidden)
        self._cosines, self._sines = program.buffer(weights.cosines.shape[1]), program.buffer(weights.sines.shape[1])
        self._record(program, rules)
        self._program = program
        self._heads: tuple[Program, Tensor, Tensor] | None = None  # with its input and its output

    @torch.inference_mode()
    def logits(self, rows: StepRows, token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """See executor/forward.py's Forward; of float32, whatever the model's dtype, and without its rounding."""
        weights, count = self._weights, token_ids.shape[0]
        if weights.embedding is None:
            self._residual[:count] = weights.head.weight.rows(token_ids)
        else:
            torch.index_select(weights.embedding, 0, token_ids, out=self._residual[:count])
        torch.index_select(weights.cosines, 0, positions, out=self._cosines[:count])
        torch.index_select(weights.sines, 0, positions, out=self._sines[:count])
        self._program.run(count, self._backend.prepare(self._cache, rows))
        few = wanted.shape[0]
        program, source, logits = self._head_for(few)
        if few:
            torch.index_select(self._normed[:count], 0, wanted, out=source[:few])
            program.run(few)
        return logits[:few]

    def _record(self, program: Program, rules: tuple[AttentionRule, ...]) -> None:
        """Record all layers; the last one ends with the norm before the head."""
        weights, rows = self._weights, self._residual.shape[0]
        shapes, q_heads = self._cache.shape.layers, self._weights.q_heads
        added = program.buffer(weights.hidden)
        gates = {layer.gate_up.weight.outputs: program.buffer(layer.gate_up.weight.outputs) for layer in weights.layers}
        gated = {width: program.buffer(width // 2) for width in gates}
        still = program.buffer(0)
        first = weights.layers[0].before_attention
        program.at_layer(1)
        program.norm(self._residual, first.weight, first.epsilon, self._normed)
        nexts = [*(layer.before_attention for layer in weights.layers[1:]), weights.last_norm]
        buffers: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for number, (layer, shape, following) in enumerate(zip(weights.layers, shapes, nexts, strict=True)):
            program.at_layer(number + 1)
            q, k = q_heads * shape.key_size, shape.kv_heads * shape.key_size
            kind = (layer.qkv.weight.outputs, shape.value_size)
            if kind not in buffers:
                widths = (layer.qkv.weight.outputs, q, k, q, q_heads * shape.value_size)
                buffers[kind] = tuple(program.buffer(width) for width in widths)
            qkv, q_normed, k_normed, turned, attended = buffers[kind]
            program.linear(self._normed, layer.qkv.weight, layer.qkv.bias, qkv)
            queries, keys, values = (
                part.view(rows, -1, size)
                for part, size in (
                    (qkv[:, :q], shape.key_size),
                    (qkv[:, q : q + k], shape.key_size),
                    (qkv[:, q + k :], shape.value_size),
                )
            )
            if layer.q_norm is not None:
                program.norm(queries, layer.q_norm.weight, layer.q_norm.epsilon, q_normed)
                queries = q_normed.view(rows, -1, shape.key_size)
            if layer.k_norm is not None:
                program.norm(keys, layer.k_norm.weight, layer.k_norm.epsilon, k_normed)
                keys = k_normed.view(rows, -1, shape.key_size)
            angles = (self._cosines, self._sines) if layer.turns else (still, still)
            program.rotate_write(number, queries, keys, values, *angles, turned)
            program.attend(number, turned.view(rows, q_heads, shape.key_size), rules[number], attended)
            program.linear(attended, layer.out.weight, layer.out.bias, added)
            program.add_norm(added, self._residual, layer.before_mlp.weight, layer.before_mlp.epsilon, self._normed)
            width = layer.gate_up.weight.outputs
            program.linear(self._normed, layer.gate_up.weight, layer.gate_up.bias, gates[width])
            program.silu_mul(gates[width], gated[width])
            program.linear(gated[width], layer.down.weight, layer.down.bias, added)
            program.add_norm(added, self._residual, following.weight, following.epsilon, self._normed)

    def _head_for(self, count: int) -> tuple[Program, Tensor, Tensor]:
        """Return the head's program for so many rows at least, its input and its output."""
        if self._heads is None or self._heads[1].shape[0] < count:
            most = max(_FEWEST_LOGITS, 1 << max(count - 1, 0).bit_length())
            program = Program(self._backend, self._cache, most, self._layer)
            program.at_layer(len(self._weights.layers))
            head = self._weights.head
            source = program.buffer(self._weights.hidden)
            logits = program.buffer(head.weight.outputs, torch.float32)
            program.linear(source, head.weight, head.bias, logits)
            self._heads = program, source, logits
        return self._heads
