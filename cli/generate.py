"""`kilburn generate`: one request, its answer printed as it comes."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import click

from cli.calls import json_option, plain, print_json, server_option, tenant_option
from cli.options import together

if TYPE_CHECKING:
    from kilburn.v1 import inference_pb2

#: What a model says goes to a terminal without the characters that would command it.
_UNPRINTABLE: Final = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

#: A prompt from standard input; longer ones are refused by the gateway anyway.
_MAX_INPUT_CHARACTERS: Final = 4 * 1024 * 1024


_sampling_options: Final = together(
    click.option("--temperature", type=float, help="0 is greedy."),
    click.option("--top-p", type=float),
    click.option("--top-k", type=int),
    click.option("--min-p", type=float),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Same seed, same tokens."),
)

_stopping_options: Final = together(
    click.option("--max-tokens", type=click.IntRange(0, 2**32 - 1), default=0, help="0: up to the context length."),
    click.option("--stop", multiple=True, help="A string that ends the answer; may be repeated."),
    click.option("--stop-token-id", "stop_token_ids", type=click.IntRange(0, 2**32 - 1), multiple=True),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end of sequence."),
    click.option("--include-stop", is_flag=True, help="Keep what ended the answer."),
)

_output_options: Final = together(
    click.option("--logprobs", type=click.IntRange(0, 20), help="With so many alternatives; shown by --json."),
    click.option("--echo", is_flag=True, help="The prompt's text first."),
    click.option("--keep-special-tokens", is_flag=True),
)


@click.command()
@click.argument("text")
@click.option("--chat", is_flag=True, help="TEXT is a user's message in the model's chat template.")
@click.option("--system", help="The system message of --chat.")
@_stopping_options
@_sampling_options
@_output_options
@click.option("--request-id", default="", help="Else the gateway chooses one.")
@click.option("--priority", type=click.IntRange(-(2**31), 2**31 - 1), default=0, help="Smaller runs first.")
@click.option("--cache-salt", default="", help="Prefixes are shared only under the same salt.")
@click.option("--deadline", type=click.FloatRange(0, min_open=True), help="Seconds after which the request ends.")
@server_option
@tenant_option
@json_option
def generate(text: str, chat: bool, system: str | None, server: str, tenant: str, as_json: bool, **fields: Any) -> None:  # noqa: ANN401
    """Stream a running gateway's answer to TEXT.

    TEXT - reads it from standard input. Ctrl-C cancels the request.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if text == "-":
        text = sys.stdin.read(_MAX_INPUT_CHARACTERS)
    from kilburn.client import Client

    deadline = fields.pop("deadline")
    request = _request(text, chat, system, fields)
    with Client(server, tenant) as client:
        stream = client.generate(request, timeout=deadline)
        try:
            reason = _collect(stream) if as_json else _print(stream)
        except KeyboardInterrupt:
            stream.cancel()
            raise
    if reason == "FINISH_REASON_ERROR":
        click.echo("kilburn: the model's logits were not numbers", err=True)
        sys.exit(1)


def _request(text: str, chat: bool, system: str | None, fields: dict[str, Any]) -> "inference_pb2.GenerateRequest":
    from kilburn.v1 import inference_pb2 as pb

    given = {name: value for name, value in fields.items() if value is not None}

    def part(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    request = pb.GenerateRequest(
        **part("request_id", "priority", "cache_salt"),
        sampling=pb.Sampling(**part("temperature", "top_p", "top_k", "min_p", "seed")),
        stopping=pb.Stopping(**part("max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop")),
        output=pb.Output(**part("logprobs", "echo", "keep_special_tokens")),
    )
    if chat:
        messages = [pb.ChatMessage(role="system", content=system)] if system is not None else []
        request.chat.messages.extend([*messages, pb.ChatMessage(role="user", content=text)])
    else:
        request.text = text
    return request


def _print(stream: "Iterable[inference_pb2.GenerateResponse]") -> str:
    """Print text as it comes; return the finish reason."""
    from kilburn.v1.inference_pb2 import FinishReason

    terminal = sys.stdout.isatty()
    reason = FinishReason.FINISH_REASON_UNSPECIFIED
    for response in stream:
        sys.stdout.write(response.text.translate(_UNPRINTABLE) if terminal else response.text)
        sys.stdout.flush()
        reason = response.finish_reason or reason
    click.echo()
    return FinishReason.Name(reason)


def _collect(stream: "Iterable[inference_pb2.GenerateResponse]") -> str:
    """Print one JSON object at the end; return the finish reason."""
    from kilburn.v1.inference_pb2 import GenerateResponse

    whole = GenerateResponse()
    text: list[str] = []
    for response in stream:
        text.append(response.text)
        response.ClearField("text")
        response.ClearField("offset")
        whole.MergeFrom(response)
    whole.text = "".join(text)
    answer = plain(whole)
    for name in ("offset", "prompt_logprobs", "score"):  # of streams of other kinds
        del answer[name]
    print_json(answer)
    return str(answer["finish_reason"])
