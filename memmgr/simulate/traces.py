"""Published traces of requests, as they are in their files, one request at a time.

    pairs       CSV with the header `prompt_tokens,output_tokens`: the lengths of ShareGPT's conversations
    azure       CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`: Azure's LLM inference trace of 2023
    mooncake    JSON lines with `input_length`, `output_length` and `hash_ids`: Mooncake's traces; an id names a block of 512
                tokens and all before it, so that prompts which begin with the same ids begin with the same tokens

The format is told by a file's first line, compression by its first bytes. Times of arrival are not read: queues are saturated.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Final, TextIO

#: Tokens that one id of a Mooncake trace stands for.
MOONCAKE_BLOCK: Final = 512

#: Tokens of one request, prompt or output. No model's context is near it; a slip in a file would be simulated for hours.
MAX_TOKENS: Final = 1 << 24

#: A longer line is no request: Mooncake's longest has some 1,300 characters for each hundred thousand tokens.
MAX_LINE_CHARACTERS: Final = 1 << 22

#: Ids become tokens, which are 32-bit; the upper half is for tokens of our own.
_MAX_ID: Final = (1 << 31) - 1

_GZIP: Final = b"\x1f\x8b"
_PAIRS_HEADER: Final = "prompt_tokens,output_tokens"
_AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceError(Exception):
    """A file is no trace, or a line of it no request. The text is one line with file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `prefix` has an id for each MOONCAKE_BLOCK tokens of the prompt, the last perhaps for fewer; or is empty."""

    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """A whole trace in a few numbers. `longest` is the most tokens of one request, prompt and output."""

    requests: int
    longest: int
    has_prefixes: bool


def survey(requests: Iterable[TraceRequest]) -> Survey:
    """Look at a trace once."""
    count, longest, has_prefixes = 0, 0, False
    for request in requests:
        count += 1
        longest = max(longest, request.prompt_tokens + max(1, request.output_tokens))
        has_prefixes = has_prefixes or bool(request.prefix)
    return Survey(count, longest, has_prefixes)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a file in their order; it is read as they are asked for.

    Raises:
        TraceError: there is no such file, it has no known format, or a line is no request.
    """
    try:
        with path.open("rb") as file:  # once: a pipe can't be read again
            compressed = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
            plain = gzip.GzipFile(fileobj=file) if compressed else file
            with TextIOWrapper(plain, encoding="utf-8-sig") as text:
                yield from parse_trace(_lines(text, str(path)), str(path))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is no text") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the compressed file is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def parse_trace(lines: Iterable[str], name: str) -> Iterator[TraceRequest]:
    """Yield the requests that a trace's lines are; `name` is for errors. Empty lines are skipped.

    Raises:
        TraceError: as above.
    """
    parse: Callable[[str], TraceRequest] | None = None
    found = False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            if parse is None:
                parse, is_header = _format_of(text)
                if is_header:
                    continue
            request = parse(text)
        except ValueError as error:
            raise TraceError(f"{name}:{number}: {error}") from error
        found = True
        yield request
    if not found:
        raise TraceError(f"{name}: has no request")


def _lines(text: TextIO, name: str) -> Iterator[str]:
    number = 0
    while line := text.readline(MAX_LINE_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARACTERS:
            raise TraceError(f"{name}:{number}: the line has more than {MAX_LINE_CHARACTERS:,} characters")
        yield line


def _format_of(first: str) -> tuple[Callable[[str], TraceRequest], bool]:
    """Return what reads a line of the trace that begins with this one, and whether this one is a header."""
    if first.startswith("{"):
        return _mooncake, False
    header = first.replace(" ", "").replace('"', "")
    if header == _PAIRS_HEADER:
        return _pair, True
    if header == _AZURE_HEADER:
        return _azure, True
    raise ValueError(
        f"no known trace begins so; known are CSV with {_PAIRS_HEADER!r} or {_AZURE_HEADER!r}, and Mooncake's JSON lines"
    )


def _pair(line: str) -> TraceRequest:
    fields = line.split(",")
    if len(fields) != 2:
        raise ValueError(f"{len(fields)} fields, not 2 ({_PAIRS_HEADER})")
    return TraceRequest(_count(fields[0], "prompt_tokens", 1), _count(fields[1], "output_tokens", 0))


def _azure(line: str) -> TraceRequest:
    fields = line.split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, not 3 ({_AZURE_HEADER})")
    return TraceRequest(_count(fields[1], "ContextTokens", 1), _count(fields[2], "GeneratedTokens", 0))


def _count(text: str, name: str, least: int) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{name} is {_short(digits)}, not a whole number")
    return _in_range(int(digits[:20]), name, least)


def _mooncake(line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    prompt_tokens = _in_range(_integer(fields, "input_length"), "input_length", 1)
    output_tokens = _in_range(_integer(fields, "output_length"), "output_length", 0)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one <= _MAX_ID for one in ids):
        raise ValueError(f"hash_ids is no list of whole numbers from 0 to {_MAX_ID}")
    expected = -(-prompt_tokens // MOONCAKE_BLOCK)
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} hash_ids for {prompt_tokens} tokens; {expected} blocks of {MOONCAKE_BLOCK} hold them")
    return TraceRequest(prompt_tokens, output_tokens, tuple(ids))


def _integer(fields: dict[str, object], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} is {_short(value)}, not a whole number" if name in fields else f"there is no {name}")
    return value


def _in_range(value: int, name: str, least: int) -> int:
    if not least <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {value}, not {least} to {MAX_TOKENS}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
