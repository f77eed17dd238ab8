"""What the common decoders have in common, read from a model of transformers: weights and numbers, without its modules.

Knows transformers' modules; not how anything is computed. A recipe is taken only from classes that are known, whose modules are
just those that are known: a version of transformers that adds one gets the general path.

The decoder:    h = embedding[ids]
                for each layer    h += out(attention(turn(norm(q)), turn(norm(k)), v))  where q, k, v = qkv(norm(h))
                                  h += down(silu(gate) * up)                            where gate, up = gate_up(norm(h))
                logits = head(norm(h))

The norms of q and k, the turn, and all biases are there or are not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Classes of transformers that are such decoders.
FAMILIES: Final = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
    }
)

#: The modules of a layer, of its attention and of its MLP; those behind | are nothing at inference, or hold no weights.
_LAYER: Final = ({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, {"resid_attn_dropout", "resid_mlp_dropout"})
_ATTENTION: Final = ({"o_proj"}, {"q_proj", "k_proj", "v_proj", "qkv_proj", "q_norm", "k_norm"})
_MLP: Final = ({"down_proj"}, {"gate_proj", "up_proj", "gate_up_proj", "act_fn", "activation_fn"})


class NoRecipeError(Exception):
    """A model is no such decoder: one line that says why."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [outputs, inner] and a bias [outputs]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: weight [size]."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One layer."""

    before_attention: Norm
    qkv: Linear  # [(q_heads + 2 kv_heads) * head_size, hidden]
    q_norm: Norm | None  # of each head
    k_norm: Norm | None
    turns: bool  # has a rotary embedding
    out: Linear
    before_mlp: Norm
    gate_up: Linear  # [2 * intermediate, hidden]: gate, then up
    down: Linear


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parts around the layers, and how the layers are had: one after the other, so that each can be let go of."""

    layers: Iterator[LayerRecipe]
    q_heads: int
    embedding: Tensor  # [vocabulary, hidden]
    head: Linear
    tied: bool  # the head's weight is the embedding
    last_norm: Norm
    cosines: Tensor  # [positions, rotary / 2]
    sines: Tensor


def read(model: "PreTrainedModel", positions: int) -> Recipe:
    """Return a model's recipe. Going through its layers takes their weights from the model, which can't be used after that.

    Args:
        model: of transformers, loaded.
        positions: how many tokens a sequence may have.

    Raises:
        NoRecipeError: see the class; the model is as it was.
    """
    kind = type(model)
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        raise NoRecipeError(f"{kind.__name__} is not one of the families that have one")
    config = model.config
    if config.hidden_act != "silu":
        raise NoRecipeError(f"its MLPs use {config.hidden_act}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1:
        raise NoRecipeError("its weights are of several dtypes")
    inner: Any = model.model
    _expect(inner, {"embed_tokens", "layers", "norm", "rotary_emb"}, set())
    for layer in inner.layers:
        _expect(layer, *_LAYER)
        _expect(layer.self_attn, *_ATTENTION)
        _expect(layer.mlp, *_MLP)
    cosines, sines = _angles(inner.rotary_emb, positions, dtypes.pop())
    embedding, head = inner.embed_tokens.weight, model.lm_head
    return Recipe(
        layers=(_layer(layer, sines.shape[1] > 0) for layer in inner.layers),
        q_heads=config.num_attention_heads,
        embedding=embedding,
        head=Linear(head.weight, head.bias),
        tied=head.weight is embedding,
        last_norm=_norm(inner.norm),
        cosines=cosines,
        sines=sines,
    )


def _expect(module: nn.Module, needed: set[str], allowed: set[str]) -> None:
    there = {name for name, _ in module.named_children()}
    if strange := there - needed - allowed or needed - there:
        raise NoRecipeError(f"{type(module).__name__} has or lacks {', '.join(sorted(strange))}")
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if own:
        raise NoRecipeError(f"{type(module).__name__} has a parameter {', '.join(sorted(own))}")


def _layer(layer: nn.Module, turns: bool) -> LayerRecipe:
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    qkv = [attention.qkv_proj] if hasattr(attention, "qkv_proj") else [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    recipe = LayerRecipe(
        before_attention=_norm(layer.input_layernorm),
        qkv=_joined(qkv),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        turns=turns and bool(getattr(attention, "use_rope", True)),
        out=_joined([attention.o_proj]),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=_joined(gate_up),
        down=_joined([mlp.down_proj]),
    )
    for module in (*qkv, attention.o_proj, *gate_up, mlp.down_proj):
        module.weight = module.bias = None
    return recipe


def _joined(linears: Sequence[nn.Linear]) -> Linear:
    """Return one product for several of the same rows."""
    weights: list[Tensor] = [each.weight for each in linears]
    biases: list[Tensor] = [each.bias for each in linears if each.bias is not None]
    if len(linears) == 1:
        return Linear(weights[0].detach(), biases[0].detach() if biases else None)
    assert len(biases) in (0, len(linears))
    return Linear(torch.cat(weights).detach(), torch.cat(biases).detach() if biases else None)


def _norm(module: nn.Module | Tensor) -> Norm:
    norm: Any = module
    return Norm(norm.weight.detach(), float(norm.variance_epsilon))


def _angles(rotary: nn.Module, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, as the model's own module has them."""
    found = rotary(torch.empty(0, dtype=dtype), torch.arange(positions)[None])
    halves = []
    for part in found:
        half = part.shape[-1] // 2
        if not torch.equal(part[..., :half], part[..., half:]):
            raise NoRecipeError(f"{type(rotary).__name__} turns by other pairs")
        halves.append(part[0, :, :half].contiguous())
    return halves[0], halves[1]
