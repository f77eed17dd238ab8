"""What `kilburn generate` prints: on standard output the answer, on standard error what became of it."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from cli.main import main
from kilburn.v1 import inference_pb2 as api

CONTEXT, LENGTH = api.FINISH_REASON_CONTEXT, api.FINISH_REASON_LENGTH


@contextmanager
def gateway(
    *responses: api.GenerateResponse, code: grpc.StatusCode | None = None
) -> Iterator[tuple[str, list[api.GenerateRequest]]]:
    """Give the address of a gateway that answers so, then fails with a code if there is one, and what it was asked."""
    asked: list[api.GenerateRequest] = []

    def generate(request: api.GenerateRequest, context: grpc.ServicerContext) -> Iterator[api.GenerateResponse]:
        asked.append(request)
        yield from responses
        if code is not None:
            context.abort(code, "it was not to be")

    handlers: dict[str, Any] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            generate, api.GenerateRequest.FromString, api.GenerateResponse.SerializeToString
        )
    }
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kilburn.v1.Inference", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", asked
    server.stop(0).wait()


def piece(text: str, reason: api.FinishReason.ValueType = api.FINISH_REASON_UNSPECIFIED, index: int = 0) -> api.GenerateResponse:
    return api.GenerateResponse(text=text, finish_reason=reason, index=index)


@pytest.mark.parametrize(
    ("responses", "words", "out", "told"),
    [
        ([piece("one"), piece(" two", LENGTH)], [], "one two\n", False),
        ([piece("one"), piece(" two", CONTEXT)], [], "one two\n", True),
        ([piece("one"), piece("", CONTEXT)], ["--max-tokens", "9"], "one\n", True),
        ([piece("one", LENGTH), piece("two", CONTEXT, 1)], ["--n", "2"], "1: one\n2: two\n", True),
        ([piece("one", LENGTH), piece("two", LENGTH, 1)], ["--n", "2"], "1: one\n2: two\n", False),
    ],
)
def test_an_answer_that_was_cut_off_is_told(
    capsys: pytest.CaptureFixture[str], responses: Sequence[api.GenerateResponse], words: list[str], out: str, told: bool
) -> None:
    with gateway(*responses) as (address, _):
        assert main(["generate", "a", *words, "--server", address]) == 0
    seen = capsys.readouterr()
    assert seen.out == out
    assert seen.err.startswith("kilburn: an answer was cut off: ") if told else seen.err == ""
    assert seen.err.count("\n") == told


@pytest.mark.parametrize(("text", "out"), [("scheduled", "scheduled\n"), ("a line\n", "a line\n"), ("", "")])
def test_an_error_after_a_part_of_the_answer_begins_a_line(capsys: pytest.CaptureFixture[str], text: str, out: str) -> None:
    with gateway(piece(text), code=grpc.StatusCode.ABORTED) as (address, _):
        assert main(["generate", "a", "--server", address]) == 1
    assert capsys.readouterr() == (out, "kilburn: ABORTED: it was not to be\n")


@pytest.mark.parametrize("count", [1, 2])
def test_json_tells_the_seed_that_was_drawn_or_given(capsys: pytest.CaptureFixture[str], count: int) -> None:
    responses = [piece("text", LENGTH, index) for index in range(count)]
    seeds = []
    for words in ([], [], ["--seed", "7"]):
        with gateway(*responses) as (address, asked):
            assert main(["generate", "a", "--n", str(count), *words, "--json", "--server", address]) == 0
        seeds.append(json.loads(capsys.readouterr().out)["seed"])
        assert asked[0].sampling.seed == seeds[-1]
    assert seeds[2] == 7
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("words", [[], ["--beams", "2", "--json"]])
def test_no_seed_is_drawn_where_none_is_shown_or_searched_with(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with gateway(piece("text", LENGTH)) as (address, asked):
        assert main(["generate", "a", *words, "--server", address]) == 0
    assert not asked[0].sampling.HasField("seed")
    assert "seed" not in capsys.readouterr().out
