"""Model folders that load at once: random weights, a tokenizer of bytes, a chat template. What they say is noise."""

from pathlib import Path
from typing import Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

#: So long that no test sees the end of a request that is to outlast it.
CONTEXT: Final = 16384

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(folder: Path, seed: int = 0, layers: int = 2, width: int = 64, spread: float = 0.02) -> Path:
    """Write a model with the weights of a seed, and return its folder.

    `spread` is the weights' standard deviation. The default is that of a new Llama, whose attention changes next to nothing; at
    0.3 every token depends on all before it.
    """
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        initializer_range=spread,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the 256 bytes and one end of sequence."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|end|>", chat_template=_CHAT_TEMPLATE, clean_up_tokenization_spaces=False
    )
