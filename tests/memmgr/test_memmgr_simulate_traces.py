"""Traces as they are in their files, and what is wrong with one: the file, the line, the reason."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from memmgr.simulate.traces import MAX_LINE_CHARACTERS, Survey, TraceError, TraceRequest, read_trace, survey

PAIRS = "prompt_tokens,output_tokens\n33,256\n17,73\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 3, "input_length": 512, "output_length": 0, "hash_ids": [0]}\n'
)
EXPECTED = {
    PAIRS: [TraceRequest(33, 256), TraceRequest(17, 73)],
    AZURE: [TraceRequest(374, 44), TraceRequest(396, 109)],
    MOONCAKE: [TraceRequest(600, 5, (0, 7)), TraceRequest(512, 0, (0,))],
}


@pytest.mark.parametrize("text", EXPECTED)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_format_is_known_by_its_content(tmp_path: Path, text: str, compressed: bool) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    assert list(read_trace(path)) == EXPECTED[text]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_pipe_is_read_once(compressed: bool) -> None:
    read, write = os.pipe()
    os.write(write, gzip.compress(PAIRS.encode()) if compressed else PAIRS.encode())
    os.close(write)
    try:
        assert list(read_trace(Path(f"/dev/fd/{read}"))) == EXPECTED[PAIRS]
    finally:
        os.close(read)


def test_marks_line_ends_and_empty_lines_of_other_systems_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + PAIRS.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    assert list(read_trace(path)) == EXPECTED[PAIRS]


def test_a_trace_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(PAIRS + "nonsense\n")
    requests = read_trace(path)
    assert next(requests) == TraceRequest(33, 256)


def test_a_survey() -> None:
    assert survey(EXPECTED[PAIRS]) == Survey(2, 289, False)
    assert survey(EXPECTED[MOONCAKE]) == Survey(2, 605, True)


def mooncake(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]} | changes
    return json.dumps({name: value for name, value in fields.items() if value != "left out"}) + "\n"


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("prompt,output\n1,2\n", 1, "no known trace"),
        ("1,2\n", 1, "no known trace"),
        ("[1]\n", 1, "no known trace"),
        (PAIRS + "1\n", 4, "1 fields, not 2"),
        (PAIRS + "1,2,3\n", 4, "3 fields, not 2"),
        (PAIRS + "1,x\n", 4, "output_tokens is 'x'"),
        (PAIRS + "0,1\n", 4, "prompt_tokens is 0"),
        (PAIRS + "-4,1\n", 4, "prompt_tokens is '-4'"),
        (PAIRS + "1_0,1\n", 4, "'1_0'"),
        (PAIRS + "1.5,1\n", 4, "'1.5'"),
        (PAIRS + "\n" + "9" * 5000 + ",1\n", 5, "16777216"),
        (PAIRS + "x" * 5000 + ",1\n", 4, "..."),
        (AZURE + "2023-11-16,374\n", 4, "2 fields, not 3"),
        (AZURE + "2023-11-16,374,\n", 4, "GeneratedTokens is ''"),
        (MOONCAKE + "{\n", 3, "no JSON"),
        (MOONCAKE + "[" * 100_000 + "\n", 3, "no JSON"),
        (MOONCAKE + "7\n", 3, "no JSON object"),
        (MOONCAKE + mooncake(input_length="left out"), 3, "no input_length"),
        (MOONCAKE + mooncake(input_length=True), 3, "input_length is True"),
        (MOONCAKE + mooncake(output_length=-1), 3, "output_length is -1"),
        (MOONCAKE + mooncake(hash_ids=[1]), 3, "1 hash_ids for 600 tokens; 2 blocks"),
        (MOONCAKE + mooncake(hash_ids=[1, "2"]), 3, "hash_ids"),
        (MOONCAKE + mooncake(hash_ids=[1, 2**31]), 3, "hash_ids"),
        (MOONCAKE + mooncake(hash_ids="left out"), 3, "hash_ids"),
        ('{"' + "x" * MAX_LINE_CHARACTERS, 1, "characters"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, part: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert part in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "no request"),
        (PAIRS.splitlines()[0].encode(), "no request"),
        (b"\xff\xfe1,2\n", "no text"),
        (gzip.compress(PAIRS.encode())[:-6], "damaged"),
        (gzip.compress(PAIRS.encode())[:12] + b"garbage", "damaged"),
    ],
    ids=["empty", "header alone", "UTF-16", "cut short", "garbage inside"],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=part) as caught:
        list(read_trace(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none"))
