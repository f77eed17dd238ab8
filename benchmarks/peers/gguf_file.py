"""A model's weights as a bf16 GGUF for llama.cpp: the same numbers as in its safetensors, none of them rounded again.

Knows Llamas in bf16, in one file or several, without biases and with plain rotary embeddings; all else is refused. Matrices stay
bf16, norms become float32, as llama.cpp's own converter has it. There is no tokenizer in the file: it is for token ids.

llama.cpp turns pairs of neighbours in a head, transformers pairs that lie half a head apart; so the rows of Q and K of each head
are put into the other order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MATRICES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS: Final = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_WHOLE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GgufError(Exception):
    """The model can't be converted: one line for people."""


def write_gguf(model: Path, path: Path) -> None:
    """Write the GGUF of a model's folder.

    Raises:
        GgufError: it is a model that this can't convert.
    """
    import gguf

    config = json.loads((model / "config.json").read_bytes())
    _check(config)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tied = config.get("tie_word_embeddings", False)
    for name, bits in _tensors(model):
        if name == "lm_head.weight" and tied:
            continue
        target = _target(name)
        if bits.ndim == 1:
            writer.add_tensor(target, _float32(bits))
            continue
        if target.endswith("attn_q.weight"):
            bits = _reordered(bits, heads)
        elif target.endswith("attn_k.weight"):
            bits = _reordered(bits, kv_heads)
        writer.add_tensor(target, _bytes(bits), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: dict[str, Any]) -> None:
    rope = _rope(config)
    wanted = {
        "architectures": (config.get("architectures"), ["LlamaForCausalLM"]),
        "hidden_act": (config.get("hidden_act"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_parameters.rope_type": (rope.get("rope_type"), "default"),
    }
    for name, (found, known) in wanted.items():
        if found != known:
            raise GgufError(f"only models whose {name} is {known} can be converted for llama.cpp, and it is {found}")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the rotary embedding is told; transformers before 5 wrote it down in another way."""
    older = (config.get("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": config.get("rope_theta", 10_000.0)}
    return config.get("rope_parameters") or older


def _target(name: str) -> str:
    """Return the name in a GGUF of a tensor of transformers' Llama."""
    whole, _, kind = name.rpartition(".")
    if kind == "weight":
        if whole in _WHOLE:
            return f"{_WHOLE[whole]}.weight"
        prefix, _, part = whole.removeprefix("model.layers.").partition(".")
        known = _MATRICES | _NORMS
        if part in known and prefix.isdecimal():
            return f"blk.{prefix}.{known[part]}.weight"
    raise GgufError(f"there is a tensor that is no Llama's: {name}")


def _tensors(model: Path) -> list[tuple[str, NDArray[np.uint16]]]:
    """Return a model's tensors by name, as the bits of their bf16 numbers. What is on disk is read as it is needed."""
    import numpy as np

    found: list[tuple[str, NDArray[np.uint16]]] = []
    for file in sorted(model.glob("*.safetensors")):
        length = int(np.fromfile(file, dtype="<u8", count=1)[0])
        with file.open("rb") as stream:
            stream.seek(8)
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] != "BF16":
                raise GgufError(f"the weights have to be bfloat16, and {name} is {tensor['dtype']}")
            offset = 8 + length + tensor["data_offsets"][0]
            found.append((name, np.memmap(file, "<u2", "r", offset, tuple(tensor["shape"]))))
    if not found:
        raise GgufError(f"there are no safetensors in {model}")
    return found


def _reordered(rows: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    """Put the rows of each head, [heads * size, width], from halves into pairs."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bytes(bits: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return [rows, 2 * width] bytes, which is how gguf takes what numpy has no type for."""
    import numpy as np

    return np.ascontiguousarray(bits).view(np.uint8)
