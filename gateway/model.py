"""What the gateway takes from a model's folder: its tokenizer, its chat template, its ends of sequence, its sampling defaults.

Knows files and tokenizers; not requests, sockets or weights. Nothing is fetched, and no code of the folder is run. Whatever is
missing or damaged is found here, at the start, and named: a tokenizer that silently came out empty would fail far from its cause.

Decoding never cleans up spaces (transformers' `clean_up_tokenization_spaces`, off by default and ignored for BPE): it would take
back text that was sent.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2

from gateway.errors import CallError, Code
from gateway.text import Decoding
from gateway.validate import (
    SamplingDefaults,
    check_min_p,
    check_temperature,
    check_top_k,
    check_top_p,
)
from kilburn.errors import StartError
from kilburn.models import fingerprint
from kilburn.v1 import inference_pb2 as api

#: A tokenizer lies in one of these; without any, transformers may make an empty one.
_VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

#: What every tokenizer of text can take; one that makes nothing of it is broken.
_SAMPLE: Final = "Hello, 1 world."

#: generation_config entries that change the output and are not applied, with their neutral values.
_NOT_APPLIED: Final[dict[str, tuple[object, ...]]] = {
    "repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "num_beams": (1,),
}


def keep_torch_out() -> None:
    """Keep transformers from importing torch where it is installed: 180 MB and three seconds for nothing that is used here.

    To be called once, first thing in the gateway's own process, and in no process that has use for torch.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment] # an import of it fails, as where it is not installed
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch


class Tokenizer:
    """One tokenizer of transformers, as the gateway uses it. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)  # None: one that is written in Python
        self._special = self._special_ids()
        self._bytes = self._byte_ids()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end of sequence."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    @property
    def size(self) -> int:
        """One more than the highest id that it can give."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return a text's ids, with the special tokens that the tokenizer adds by itself if they are wanted."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens, verbose=False)
        return ids

    def render(self, chat: api.Chat) -> str:
        """Return a conversation as the model's chat template writes it, special tokens included.

        Raises:
            CallError: there is no template, or it does not take this conversation.
        """
        if not self.has_chat_template:
            raise CallError(Code.BAD_CHAT, "this model has no chat template; send text or token_ids", "chat")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
            )
        except (jinja2.TemplateError, ValueError, TypeError, LookupError) as error:
            raise CallError(Code.BAD_CHAT, f"the model's chat template refuses this chat: {error}", "chat") from error
        return rendered

    def decode(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """Return the text of all ids at once."""
        decoding = self.decoding(keep_special_tokens)
        return decoding.decode([token for token in ids if not decoding.is_silent(token)])

    def decoding(self, keep_special_tokens: bool) -> Decoding:
        """Return how to decode with special tokens kept, or skipped."""
        skipped = frozenset() if keep_special_tokens else self._special
        if self._backend is None:
            size = self.size
            return Decoding(self._decode_in_python, lambda token: token in skipped or token >= size, self._bytes)
        id_to_token = self._backend.id_to_token
        return Decoding(self._decode, lambda token: token in skipped or id_to_token(token) is None, self._bytes)

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._backend is not None
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def _decode_in_python(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self._tokenizer.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def _byte_ids(self) -> frozenset[int]:
        """The byte tokens, if the decoder has byte fallback: the tokenizer's own description says so."""
        if self._backend is None or '"ByteFallback"' not in json.dumps(json.loads(self._backend.to_str()).get("decoder")):
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(number for number in ids if number is not None)


@dataclass(frozen=True, slots=True)
class TextModel:
    """All that the gateway knows of its model."""

    folder: Path
    fingerprint: str
    tokenizer: Tokenizer
    tokens: int  # of the tokenizer: its highest id and one
    vocab_size: int | None  # as config.json says, None where it does not
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    not_applied: tuple[str, ...]  # what generation_config asks for and this version does not do


def load(folder: Path) -> TextModel:
    """Read what the gateway needs. Takes seconds: the import of transformers, the tokenizer's file.

    Raises:
        StartError: a file is missing or damaged, or the tokenizer is of another model.
    """
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    text_config = _section(config, "text_config")
    vocab_size = config.get("vocab_size", text_config.get("vocab_size"))
    tokenizer = _load_tokenizer(folder)
    tokens = tokenizer.size
    if isinstance(vocab_size, int) and tokens > vocab_size:
        raise StartError(
            f"{folder}: the tokenizer has {tokens} tokens and the model a vocabulary of {vocab_size}; they are of two models"
        )
    sources = (config.get("eos_token_id"), text_config.get("eos_token_id"), generation.get("eos_token_id"), tokenizer.eos_id)
    return TextModel(
        folder=folder,
        fingerprint=fingerprint(folder),
        tokenizer=tokenizer,
        tokens=tokens,
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
        eos_ids=_merge_ids(sources, vocab_size if isinstance(vocab_size, int) else tokens),
        defaults=_sampling_defaults(generation, folder / "generation_config.json"),
        not_applied=_not_applied(generation),
    )


def _load_tokenizer(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in _VOCABULARIES) and not list(folder.glob("*.tiktoken")):
        raise StartError(f"{folder / 'tokenizer.json'} is missing: a model folder needs its tokenizer")
    from transformers import AutoTokenizer  # here, because it takes seconds

    try:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
        ids = tokenizer.encode(_SAMPLE)
        text = tokenizer.decode(ids)
    except Exception as error:  # whatever the many loaders raise for a damaged file
        raise StartError(f"can't load the tokenizer of {folder}: {_first_line(error)}") from error
    if not ids or not text.strip():
        raise StartError(f"the tokenizer of {folder} makes nothing of {_SAMPLE!r}: its vocabulary is missing or damaged")
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{path} is damaged: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise StartError(f"{path} is damaged: it holds no JSON object")
    return content


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    section = config.get(key)
    return section if isinstance(section, dict) else {}


def _merge_ids(sources: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    """Join ids, each source one, a list or none; what is no token of the model (-1, say) can't end anything."""
    merged: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, list) else [source]:
            if isinstance(token, int) and 0 <= token < vocab_size:
                merged[token] = None
    return tuple(merged)


def _sampling_defaults(generation: dict[str, Any], path: Path) -> SamplingDefaults:
    """Take the fields that the model names; a null is none."""
    named = {key: generation[key] for key in ("temperature", "top_p", "top_k", "min_p") if generation.get(key) is not None}
    protocol = SamplingDefaults()
    try:
        return SamplingDefaults(
            temperature=check_temperature(float(named.get("temperature", protocol.temperature))),
            top_p=check_top_p(float(named.get("top_p", protocol.top_p))),
            top_k=check_top_k(int(named.get("top_k", protocol.top_k))),
            min_p=check_min_p(float(named.get("min_p", protocol.min_p))),
        )
    except (CallError, TypeError, ValueError) as error:
        raise StartError(f"{path} is damaged: {_first_line(error)}") from error


def _not_applied(generation: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        key for key, neutral in _NOT_APPLIED.items() if generation.get(key) is not None and generation[key] not in neutral
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
