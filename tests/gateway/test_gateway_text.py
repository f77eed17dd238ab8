"""Text from ids: whatever the tokenizer and the ids, joined pieces are the decoding at once, and stop strings never show."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from gateway.model import load
from gateway.text import Decoding, Detokenizer, OutputText, StopMatcher
from gateway.tokenizer import Tokenizer, byte_names
from kilburn.config import DEFAULT_MODEL
from kilburn.models import find_model
from tests.gateway.gateway_support import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    wordpiece_tokenizer,
)

TOKENIZERS = {
    "byte-level": Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())),
    "byte-fallback": Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_fallback_tokenizer())),
    "metaspace": Tokenizer(PreTrainedTokenizerFast(tokenizer_object=metaspace_tokenizer())),
    "wordpiece": Tokenizer(PreTrainedTokenizerFast(tokenizer_object=wordpiece_tokenizer())),
    "python": Tokenizer(ByT5Tokenizer()),
}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def pieces(decoding: Decoding, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decoding)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids as a model may sample them: single ones, runs of few, and ids that no token has."""
    some = st.integers(0, tokenizer.size + 3)
    runs = st.lists(some, min_size=1, max_size=4).flatmap(lambda few: st.lists(st.sampled_from(few), max_size=60))
    return st.one_of(st.lists(some, max_size=60), runs, st.lists(runs, max_size=4).map(lambda parts: [*itertools.chain(*parts)]))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("keep", [False, True])
@given(data=st.data())
def test_joined_pieces_are_the_decoding_at_once(name: str, keep: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    assert "".join(pieces(tokenizer.decoding(keep), ids)) == tokenizer.decode(ids, keep)


@given(text=st.text(max_size=40))
def test_what_is_encoded_streams_back(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(pieces(tokenizer.decoding(False), tokenizer.encode(text, special_tokens=False))) == text


@pytest.mark.parametrize("keep", [False, True])
def test_decoding_is_that_of_transformers(keep: bool) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>")
    ids = plain.encode("The kiln 😀<|end|> burned")
    assert Tokenizer(plain).decode(ids, keep) == plain.decode(ids, skip_special_tokens=not keep)


def byte_ids(text: str) -> list[int]:
    """Return the ids of a text's single bytes in the byte-level tokenizer."""
    vocabulary = byte_level_tokenizer().get_vocab()
    names = byte_names()
    return [vocabulary[names[byte]] for byte in text.encode()]


def fallback_ids(content: bytes) -> list[int]:
    """Return the byte tokens of the byte-fallback tokenizer."""
    return [3 + byte for byte in content]


@pytest.mark.parametrize("text", ["é", "東京都", "😀", "👩\u200d👩\u200d👧 สวัสดี", f"{REPLACEMENT}a{REPLACEMENT}"])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_is_never_split(text: str, kind: str) -> None:
    ids = byte_ids(text) if kind == "byte-level" else fallback_ids(text.encode())
    found = pieces(TOKENIZERS[kind].decoding(False), ids)
    assert "".join(found) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in found)


def test_a_character_is_sent_as_soon_as_it_is_whole() -> None:
    assert pieces(TOKENIZERS["byte-level"].decoding(False), byte_ids("é😀a")) == ["", "é", "", "", "", "😀", "a", ""]


def test_an_unfinished_character_is_flushed_once() -> None:
    for kind, ids in ("byte-level", byte_ids("a😀")[:-1]), ("byte-fallback", fallback_ids("a😀".encode()[:-1])):
        found = pieces(TOKENIZERS[kind].decoding(False), ids)
        assert "".join(found) == TOKENIZERS[kind].decode(ids)
        assert not any(REPLACEMENT in piece for piece in found[:-1])
        assert REPLACEMENT in found[-1]


def test_a_wrong_byte_undoes_a_run_of_byte_tokens_before_it_was_sent() -> None:
    """The decoder makes nothing but replacement characters of a run with one wrong byte, the valid ones before it too."""
    ids = [*fallback_ids(b"\xc3\xa9\xff"), *TOKENIZERS["byte-fallback"].encode("a", special_tokens=False)]
    assert pieces(TOKENIZERS["byte-fallback"].decoding(False), ids) == ["", "", "", f"{REPLACEMENT * 3}a", ""]


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("byte-level", byte_ids("a")),
        ("byte-level", byte_ids("😀")[:1]),
        ("byte-level", byte_ids("😀")[:2]),
        ("byte-fallback", fallback_ids(b"\xff")),
        ("byte-fallback", [262]),
        ("wordpiece", [3, 4]),
    ],
)
def test_the_cost_of_a_token_does_not_grow(kind: str, ids: list[int]) -> None:
    """A window that grew with the text would show here: in the ids given to the decoder, whatever the machine's speed."""
    decoding = TOKENIZERS[kind].decoding(False)
    seen: list[int] = []

    def decode(window: Sequence[int]) -> str:
        seen.append(len(window))
        return decoding.decode(window)

    detokenizer = Detokenizer(Decoding(decode, decoding.is_silent, decoding.byte_ids))
    tokens = ids * (4000 // len(ids))
    joined = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert joined == TOKENIZERS[kind].decode(tokens)
    assert sum(seen) < 40 * len(tokens)


def test_a_decoder_that_remembers_more_than_the_context_costs_more_and_stays_right() -> None:
    """A window is cut only if its end is seen to read the same alone; here all that follows a first 0 is upper case."""

    def decode(ids: Sequence[int]) -> str:
        text = "".join(chr(96 + token) for token in ids if token)
        return text.upper() if ids and ids[0] == 0 else text

    ids = [0, *(1 + number % 26 for number in range(200))]
    assert "".join(pieces(Decoding(decode, lambda _: False, frozenset()), ids)) == decode(ids)


@pytest.mark.model
@settings(max_examples=10)
@given(data=st.data())
def test_the_default_model_streams_as_it_decodes(data: st.DataObject) -> None:
    tokenizer = default_tokenizer()
    ids = data.draw(ids_of(tokenizer))
    for keep in (False, True):
        assert "".join(pieces(tokenizer.decoding(keep), ids)) == tokenizer.decode(ids, keep)
    ids = tokenizer.encode(data.draw(st.text(max_size=40)))  # not every byte has a token in it
    assert "".join(pieces(tokenizer.decoding(False), ids)) == tokenizer.decode(ids)


@functools.cache
def default_tokenizer() -> Tokenizer:
    folder = find_model(DEFAULT_MODEL)
    if folder is None:
        pytest.skip("the default model is not on this machine")
    return load(folder).tokenizer


# ------------------------------------------------------------------------------------------------------- stop strings

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text(alphabet="abc", max_size=5), max_size=12)


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """The plain definition: the end that comes first, of those the longest string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return -1, ""


def matched(stops: Sequence[str], texts: Sequence[str], include: bool) -> tuple[list[str], str]:
    matcher, sent = StopMatcher(stops, include), []
    for text in texts:
        piece, match = matcher.push(text)
        sent.append(piece)
        if match:
            return sent, match
    return [*sent, matcher.flush()], ""


@given(stops=STOPS, texts=PIECES, include=st.booleans())
def test_stops_are_found_as_by_their_definition(stops: list[str], texts: list[str], include: bool) -> None:
    text = "".join(texts)
    end, stop = first_match(text, stops)
    sent, match = matched(stops, texts, include)
    assert match == stop
    if match:
        assert "".join(sent) == text[: end if include else end - len(stop)]
    else:
        assert "".join(sent) == text


@given(stops=STOPS, texts=PIECES)
def test_nothing_is_sent_that_a_stop_could_begin_with(stops: list[str], texts: list[str]) -> None:
    """After each piece, what was sent may be followed by anything without a stop string having been sent in part."""
    matcher, sent, seen = StopMatcher(stops, include=False), "", ""
    for text in texts:
        piece, match = matcher.push(text)
        sent, seen = sent + piece, seen + text
        if match:
            return
        held = seen[len(sent) :]
        assert all(not seen.endswith(stop[:length]) or length <= len(held) for stop in stops for length in range(len(stop)))
        assert any(stop.startswith(held) for stop in stops), "more is held back than has to be"


@given(stops=STOPS, texts=PIECES, include=st.booleans())
def test_how_the_text_is_cut_does_not_matter(stops: list[str], texts: list[str], include: bool) -> None:
    whole, match = matched(stops, ["".join(texts)], include)
    single, same = matched(stops, list("".join(texts)), include)
    assert ("".join(whole), match) == ("".join(single), same)


def output(stops: Sequence[str], ids: Sequence[int], include: bool = False) -> tuple[str, str, int]:
    """Return the text, the match, and the number of ids that were needed."""
    text, sent = OutputText(TOKENIZERS["byte-level"].decoding(False), stops, include), ""
    for number, token in enumerate(ids, start=1):
        piece, match = text.push(token)
        sent += piece
        if match:
            return sent, match, number
    piece, match = text.finish()
    return sent + piece, match, len(ids)


@pytest.mark.parametrize(
    ("stops", "text", "match"),
    [
        (["Paris"], "The capital of France is ", "Paris"),
        (["ance is P"], "The capital of Fr", "ance is P"),
        (["Rome", "is"], "The capital of France ", "is"),
        (["aris.", "Paris."], "The capital of France is ", "Paris."),
        (["Paris. And"], "The capital of France is Paris. 😀", ""),
        (["."], "The capital of France is Paris", "."),
        (["😀"], "The capital of France is Paris. ", "😀"),
    ],
)
def test_stops_that_begin_and_end_within_tokens(stops: list[str], text: str, match: str) -> None:
    full = "The capital of France is Paris. 😀"
    ids = TOKENIZERS["byte-level"].encode(full, special_tokens=False)
    assert output(stops, ids)[:2] == (text, match)
    assert output(stops, byte_ids(full))[:2] == (text, match)
    assert output(stops, ids, include=True)[:2] == (text + match, match)


@given(text=st.text(alphabet="ab é", max_size=20), stops=STOPS)
def test_the_count_of_tokens_is_the_least_that_has_the_stop(text: str, stops: list[str]) -> None:
    ids = byte_ids(text)
    _, match, count = output(stops, ids)
    decode: Callable[[Sequence[int]], str] = TOKENIZERS["byte-level"].decode
    if match:
        assert match in decode(ids[:count])
        assert not any(stop in decode(ids[: count - 1]) for stop in stops)
    else:
        assert not any(stop in text for stop in stops)


def test_long_stops_that_almost_match_cost_little() -> None:
    """Sixteen strings of 256 equal characters against a text of their prefixes: the worst for a search from the start."""
    matcher = StopMatcher(["a" * 255 + chr(ord("b") + number) for number in range(16)], include=False)
    began = time.perf_counter()
    for _ in range(2000):
        matcher.push("aaa")
    assert time.perf_counter() - began < 2
    assert len(matcher.flush()) == 255


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.integers(0, 8),
    st.booleans(),
)
def test_only_a_stop_that_ends_in_a_piece_that_counts_is_found(
    stops: list[str], texts: list[str], first: int, include: bool
) -> None:
    matcher, sent, found = StopMatcher(stops, include), "", ""
    for number, text in enumerate(texts):
        piece, found = matcher.push(text, counts=number >= first)
        sent += piece
        if found:
            break
    whole, skipped = "".join(texts), len("".join(texts[:first]))
    ends = [
        (end, stop) for end in range(skipped + 1, len(whole) + 1) for stop in sorted(stops, key=len) if whole[:end].endswith(stop)
    ]
    if not ends:
        assert (sent + matcher.flush(), found) == (whole, "")
        return
    end = ends[0][0]
    assert found == max((stop for at, stop in ends if at == end), key=len)
    assert sent == whole[: end if include else end - len(found)]
