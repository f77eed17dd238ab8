"""One tokenizer of transformers, as the gateway uses it. Its methods may be called from any thread.

Knows how text becomes ids and ids text; not where tokenizers lie. Most are the Rust library's; the few that are written in Python
serve as well, more slowly.

Decoding never cleans up spaces (transformers' `clean_up_tokenization_spaces`, off by default and ignored for BPE): that would
take back text that was sent.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from gateway.errors import CallError, Code
from gateway.text import Decoding
from kilburn.v1 import inference_pb2 as api

#: Steps of a pre-tokenizer that drop nothing of the text, unless their behavior is "Removed".
_LOSSLESS: Final = ("ByteLevel", "Digits", "Split", "Punctuation")

#: Composing characters (NFC) makes at most three bytes one: 한 is nine bytes of jamo and three composed.
_NFC_SHRINKS: Final = 3


class Tokenizer:
    """See the module."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers has no types
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)  # None: one that is written in Python
        self._special: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._bytes: frozenset[int] = frozenset()
        self._bound: _Bound | None = None
        if self._backend is not None:
            # A tokenizer may be saved with these on; prompts must come out whole.
            self._backend.no_truncation()
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
            self._special = frozenset(number for number, token in added.items() if token.special)
            description = json.loads(self._backend.to_str())
            self._bytes = self._byte_ids(description)
            self._bound = _bound(description, self._backend.get_vocab())

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

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text surely has, found much faster than the tokens; 0 where nothing is sure."""
        return self._bound.least_tokens(text) if self._bound else 0

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return a text's ids, with the special tokens that the tokenizer adds by itself if they are wanted."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens, verbose=False))
        # Without offsets into the text, which nobody here wants: half the time, and outside Python's lock.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        return list(encoding.ids)

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
        """Return the text of all ids at once; an id without a token has none."""
        if self._backend is None:
            return self._decode_in_python([token for token in ids if not self._is_silent_in_python(token, keep_special_tokens)])
        text: str = self._backend.decode(ids, skip_special_tokens=not keep_special_tokens)
        return text

    def decoding(self, keep_special_tokens: bool) -> Decoding:
        """Return how to decode with special tokens kept, or skipped."""
        if self._backend is None:
            return Decoding(
                self._decode_in_python, lambda token: self._is_silent_in_python(token, keep_special_tokens), self._bytes
            )
        skipped = frozenset() if keep_special_tokens else self._special
        id_to_token = self._backend.id_to_token
        return Decoding(
            lambda ids: self.decode(ids, keep_special_tokens=True),
            lambda token: token in skipped or id_to_token(token) is None,
            self._bytes,
        )

    def _decode_in_python(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _is_silent_in_python(self, token: int, keep_special_tokens: bool) -> bool:
        return token >= len(self._tokenizer) or (token in self._special and not keep_special_tokens)

    def _byte_ids(self, description: dict[str, Any]) -> frozenset[int]:
        """Return the byte tokens, if the decoder has byte fallback."""
        assert self._backend is not None
        if "ByteFallback" not in {part["type"] for part in _parts(description.get("decoder"), "decoders")}:
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(number for number in ids if number is not None)


def _parts(description: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a component, which is one step or a sequence of them."""
    if description is None:
        return []
    parts: list[dict[str, Any]] = description[key] if description["type"] == "Sequence" else [description]
    return parts


@dataclass(frozen=True, slots=True)
class _Bound:
    """How little a text can come to."""

    longest_token: int  # bytes of text that one token stands for
    dropped: bytes  # bytes that have no token, and vanish

    def least_tokens(self, text: str) -> int:
        return -(-len(text.encode().translate(None, self.dropped)) // self.longest_token)


def _bound(description: dict[str, Any], vocabulary: dict[str, int]) -> _Bound | None:
    """Return the bound of byte-level BPE with no other steps that drop anything: all of a text's bytes are in its tokens then."""
    normalizers = {part["type"] for part in _parts(description.get("normalizer"), "normalizers")}
    splitters = _parts(description.get("pre_tokenizer"), "pretokenizers")
    is_sure = (
        description["model"]["type"] == "BPE"
        and description["model"].get("unk_token") is None  # one could stand for any number of bytes
        and normalizers <= {"NFC"}
        and "ByteLevel" in {part["type"] for part in splitters}
        and all(part["type"] in _LOSSLESS and part.get("behavior") != "Removed" for part in splitters)
        and not any(token["lstrip"] or token["rstrip"] for token in description["added_tokens"])
    )
    if not is_sure:
        return None
    # In such a vocabulary a token has one character for each byte; an added token is text as it is.
    added = [len(token["content"].encode()) for token in description["added_tokens"]]
    longest = max([*map(len, vocabulary), *added])
    dropped = bytes(byte for byte, name in enumerate(byte_names()) if name not in vocabulary)
    return _Bound(longest * (_NFC_SHRINKS if normalizers else 1), dropped)


def byte_names() -> list[str]:
    """Return the character by which byte-level BPE writes each byte (GPT-2's): itself if it can be seen, else one from 256."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
