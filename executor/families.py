"""Which kinds of model can't be served, told from their configuration, by name, before their weights are read.

Knows configurations. What it does not know to refuse is found out by executor/probe.py, which measures.
"""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kilburn.errors import StartError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Families that add to the scores what the attention interface does not carry.
_ALIBI: Final = frozenset({"bloom", "mpt"})

#: Families whose state is not (only) keys and values of tokens.
_RECURRENT: Final = frozenset(
    {"rwkv", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "xlstm", "recurrent_gemma", "zamba", "zamba2", "jamba", "bamba"}
)

#: What layer_types may say: layers whose memory is K and V of all tokens, or of the latest ones.
_SERVED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})

#: Rotary embeddings that change with the longest position of the batch, so that one sequence would change another's numbers.
#: Below the original context length they do not.
_LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Context:
    """The longest sequence, and what sets it."""

    tokens: int
    set_by: str


def check_family(config: "PreTrainedConfig") -> None:
    """Let pass what may be served.

    Raises:
        StartError: it is known that this model can't be.
    """
    name = f"{config.model_type} models can't be served"
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(f"{name}: they have an encoder")
    for model_type in (config.model_type, text.model_type):
        if model_type in _ALIBI:
            raise StartError(f"{name}: they use ALiBi")
        if model_type in _RECURRENT:
            raise StartError(f"{name}: they keep a recurrent state that no block of keys and values can hold")
    if getattr(text, "alibi", False):
        raise StartError(f"{name} with ALiBi")
    others = set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYERS
    if others:
        raise StartError(f"{name}: they have layers of type {', '.join(sorted(others))}")


def model_class(config: "PreTrainedConfig") -> type["PreTrainedModel"]:
    """Return the class of transformers for this configuration.

    Raises:
        StartError: it has none that generates text in a way that can be served.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    name = f"{config.model_type} models can't be served"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise StartError(f"{name}: transformers has no causal language model for them")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not found._can_set_attn_implementation():
        raise StartError(f"{name}: {found.__name__} does not use the attention interface of transformers")
    parameters = inspect.signature(found.forward).parameters
    for needed in ("input_ids", "position_ids", "logits_to_keep"):
        if needed not in parameters:
            raise StartError(f"{name}: {found.__name__}.forward takes no {needed}")
    chosen: type[PreTrainedModel] = found
    return chosen


def check_parallel(config: "PreTrainedConfig", world: int) -> None:
    """Let pass what can be split among `world` ranks by the plan that transformers has for it.

    Raises:
        StartError: there is no plan, or the heads can't be dealt out evenly.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise StartError(f"{config.model_type} models can't be split: transformers has no tensor-parallel plan for them")
    for counts, what in ((_kv_heads(text), "KV heads"), ([text.num_attention_heads], "attention heads")):
        for count in counts:
            if count % world:
                has = f"this {config.model_type} model has {count} {what}"
                raise StartError(f"--tensor-parallel {world}: {has}, which can't be dealt out evenly")


def most_kv_heads(config: "PreTrainedConfig") -> int:
    """Return how many KV heads a layer has at most, by the configuration."""
    return max(_kv_heads(config.get_text_config(decoder=True)))


def _kv_heads(text: "PreTrainedConfig") -> list[int]:
    found = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return [found] if isinstance(found, int) else list(found)  # some families say it for each layer


def context_limits(config: "PreTrainedConfig") -> list[Context]:
    """Return how many tokens the model was made for, and to what length it can be batched; empty where it does not say."""
    text = config.get_text_config(decoder=True)
    known = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")]
    limits = [Context(tokens, "the model") for tokens in known if isinstance(tokens, int) and tokens > 0][:1]
    parameters = getattr(text, "rope_parameters", None) or {}
    each = [parameters] if "rope_type" in parameters else [value for value in parameters.values() if isinstance(value, dict)]
    for rope in each:
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE and original:
            limits.append(Context(original, f"its {rope['rope_type']} rotary embedding, which changes with the batch beyond"))
    return limits
