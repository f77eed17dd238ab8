"""What the gateway takes from a model's folder: its tokenizer, its ends of sequence, its sampling defaults.

Knows the folder's files; not requests, sockets or weights. Nothing is fetched, and no code of the folder is run. Whatever is
missing or damaged is found here, at the start, and named: a tokenizer that silently came out empty would fail far from its cause.
"""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.errors import CallError
from gateway.tokenizer import Tokenizer
from gateway.validate import (
    SamplingDefaults,
    check_min_p,
    check_repetition_penalty,
    check_temperature,
    check_top_k,
    check_top_p,
)
from kilburn.errors import StartError
from kilburn.models import fingerprint

#: A tokenizer lies in one of these; without any, transformers may make an empty one.
_VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

#: What every tokenizer of text can take; one that makes nothing of it is broken.
_SAMPLE: Final = "Hello, 1 world."

#: Of a reason that a loader gives, in characters.
_MAX_REASON: Final = 300

#: generation_config entries that change the output and are not applied, with their neutral values.
_NOT_APPLIED: Final[dict[str, tuple[object, ...]]] = {
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
    present = [name for name in _VOCABULARIES if (folder / name).is_file()] + [path.name for path in folder.glob("*.tiktoken")]
    if not present:
        raise StartError(f"{folder / 'tokenizer.json'} is missing: a model folder needs its tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the loader would not say which of them is damaged
        if (folder / name).exists():
            _read_json(folder / name)
    from transformers import AutoTokenizer  # here, because it takes seconds

    try:
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
        ids = tokenizer.encode(_SAMPLE)
        text = tokenizer.decode(ids)
    except Exception as error:  # whatever the many loaders raise for a damaged file
        if not (folder / "tokenizer.json").exists():  # the loader would ask for whatever it tried last
            raise StartError(
                f"{folder / 'tokenizer.json'} is missing, and no tokenizer can be made of {present[0]}: {_one_line(error)}"
            ) from error
        raise StartError(f"can't load the tokenizer of {folder}: {_one_line(error)}") from error
    if not ids or not text.strip():
        raise StartError(f"the tokenizer of {folder} makes nothing of {_SAMPLE!r}: its vocabulary is missing or damaged")
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{path} is damaged: {_one_line(error)}") from error
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
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    named = {key: generation[key] for key in keys if generation.get(key) is not None}
    protocol = SamplingDefaults()
    try:
        return SamplingDefaults(
            temperature=check_temperature(float(named.get("temperature", protocol.temperature))),
            top_p=check_top_p(float(named.get("top_p", protocol.top_p))),
            top_k=check_top_k(int(named.get("top_k", protocol.top_k))),
            min_p=check_min_p(float(named.get("min_p", protocol.min_p))),
            repetition_penalty=check_repetition_penalty(float(named.get("repetition_penalty", protocol.repetition_penalty))),
        )
    except (CallError, TypeError, ValueError) as error:
        raise StartError(f"{path} is damaged: {_one_line(error)}") from error


def _not_applied(generation: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        key for key, neutral in _NOT_APPLIED.items() if generation.get(key) is not None and generation[key] not in neutral
    )


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), _MAX_REASON, placeholder=" ...") or type(error).__name__
