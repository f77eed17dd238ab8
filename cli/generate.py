"""`kilburn generate`: one request, its answer printed as it comes."""

import secrets
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import click

from cli.calls import gateway_client, json_option, plain, print_json, server_option, tenant_option
from cli.options import NumberRange, Parsed, WholeRange, number, together, whole_number
from kilburn.limits import MAX_BEAM_WIDTH, MAX_SAMPLES

if TYPE_CHECKING:
    from kilburn.v1 import inference_pb2

#: What a model says goes to a terminal without the characters that would command it.
_UNPRINTABLE: Final = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

#: A prompt from standard input; longer ones are refused by the gateway anyway.
_MAX_INPUT_CHARACTERS: Final = 4 * 1024 * 1024


#: Seeds that are drawn here: programs that read JSON have whole numbers up to this one at least.
_SEEDS: Final = 2**53

_CUT_OFF: Final = "an answer was cut off: the model's context, the pool, or what its tenant may hold has no room for more"

_sampling_options: Final = together(
    click.option(
        "--temperature",
        type=Parsed("float", number),
        help="More makes unlikely tokens likelier; 0: the likeliest one each time. Default: what the model names, else 1.",
    ),
    click.option(
        "--top-p",
        type=Parsed("float", number),
        help="Draw from the likeliest tokens that together have this probability, more than 0; 1: from all. "
        "Default: what the model names, else 1.",
    ),
    click.option(
        "--top-k",
        type=Parsed("integer", whole_number),
        help="Draw from so many of the likeliest tokens; 0 or -1: from all. Default: what the model names, else all.",
    ),
    click.option(
        "--min-p",
        type=Parsed("float", number),
        help="Draw from the tokens that have this share of the likeliest one's probability at least, 0 to 1; 0: from all. "
        "Default: what the model names, else 0.",
    ),
    click.option(
        "--seed",
        type=WholeRange(0, 2**64 - 1),
        help="Same seed, same tokens, where the model runs in float32; in bfloat16 and float16 rounding differs with the batch. "
        "Default: another one each time, which --json shows.",
    ),
)

_many_options: Final = together(
    click.option("--n", type=WholeRange(1, MAX_SAMPLES), default=1, show_default=True, help="Answers to return."),
    click.option("--beams", "beam_width", type=WholeRange(2, MAX_BEAM_WIDTH), help="Search with so many beams."),
    click.option("--length-penalty", type=Parsed("float", number), help="Of beams: more favours longer answers; default 1."),
)

_stopping_options: Final = together(
    click.option(
        "--max-tokens",
        type=WholeRange(0, 2**32 - 1),
        default=0,
        help="Tokens of an answer at most; 0: as many as the context has room for. Default: 0.",
    ),
    click.option("--stop", multiple=True, help="A string that ends the answer; may be repeated."),
    click.option("--stop-token-id", "stop_token_ids", type=WholeRange(0, 2**32 - 1), multiple=True, help="Ends the answer."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end of sequence."),
    click.option("--include-stop", is_flag=True, help="Keep what ended the answer."),
)

_output_options: Final = together(
    click.option("--logprobs", type=WholeRange(0, 20), help="With so many alternatives; shown by --json."),
    click.option("--echo", is_flag=True, help="The prompt's text first."),
    click.option("--keep-special-tokens", is_flag=True, help="Show them in the text."),
)


@click.command()
@click.argument("text")
@click.option("--chat", is_flag=True, help="TEXT is a user's message in the model's chat template.")
@click.option("--system", help="The system message of --chat.")
@_stopping_options
@_sampling_options
@_many_options
@_output_options
@click.option("--request-id", default="", help="Else the gateway chooses one.")
@click.option("--priority", type=WholeRange(-(2**31), 2**31 - 1), default=0, help="Smaller runs first.")
@click.option("--cache-salt", default="", help="Prefixes are shared only under the same salt.")
@click.option("--deadline", type=NumberRange(0, min_open=True), help="Seconds after which the request ends.")
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
    deadline = fields.pop("deadline")
    if as_json and fields["seed"] is None and fields["beam_width"] is None:
        fields["seed"] = secrets.randbelow(_SEEDS)  # the gateway would draw one and not tell it
    request = _request(text, chat, system, fields)
    with gateway_client(server, tenant) as client:
        stream = client.generate(request, timeout=deadline)
        try:
            reasons = _collect(stream, request.n, fields["seed"]) if as_json else _print(stream, request.n)
        except KeyboardInterrupt:
            stream.cancel()
            raise
    if "FINISH_REASON_CONTEXT" in reasons and not as_json:
        click.echo(f"kilburn: {_CUT_OFF}", err=True)
    if "FINISH_REASON_ERROR" in reasons:
        click.echo("kilburn: the model's logits were not numbers", err=True)
        sys.exit(1)


def _request(text: str, chat: bool, system: str | None, fields: dict[str, Any]) -> "inference_pb2.GenerateRequest":
    from kilburn.v1 import inference_pb2 as pb

    given = {name: value for name, value in fields.items() if value is not None}

    def part(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    request = pb.GenerateRequest(
        **part("request_id", "priority", "cache_salt", "n", "beam_width", "length_penalty"),
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


def _print(stream: "Iterable[inference_pb2.GenerateResponse]", count: int) -> set[str]:
    """Print text as it comes, or several answers one after the other once all are there; return the finish reasons."""
    import grpc

    from kilburn.v1.inference_pb2 import FinishReason

    terminal = sys.stdout.isatty()
    if count > 1:
        answers = _gather(stream, count)
        for number, answer in enumerate(answers, start=1):
            score = f" (score {answer.score:.4f})" if answer.score else ""
            click.echo(f"{number}{score}: {answer.text.translate(_UNPRINTABLE) if terminal else answer.text}")
        return {FinishReason.Name(answer.finish_reason) for answer in answers}
    reason = FinishReason.FINISH_REASON_UNSPECIFIED
    open_line = False
    try:
        for response in stream:
            sys.stdout.write(response.text.translate(_UNPRINTABLE) if terminal else response.text)
            sys.stdout.flush()
            reason = response.finish_reason or reason
            open_line = not response.text.endswith("\n") if response.text else open_line
    except grpc.RpcError:
        if open_line:
            click.echo()  # what went wrong is said on a line of its own
        raise
    click.echo()
    return {FinishReason.Name(reason)}


def _collect(stream: "Iterable[inference_pb2.GenerateResponse]", count: int, seed: int | None) -> set[str]:
    """Print one JSON object at the end: an answer, or several under `answers`, and the seed; return the finish reasons."""
    answers = [plain(answer) for answer in _gather(stream, count)]
    for answer in answers:
        for name in ("offset", "prompt_logprobs"):  # of streams of other kinds
            del answer[name]
    drawn = {} if seed is None else {"seed": seed}
    print_json((answers[0] if count == 1 else {"answers": answers}) | drawn)
    return {str(answer["finish_reason"]) for answer in answers}


def _gather(stream: "Iterable[inference_pb2.GenerateResponse]", count: int) -> "list[inference_pb2.GenerateResponse]":
    """Return each index's whole answer."""
    from kilburn.v1.inference_pb2 import GenerateResponse

    answers = [GenerateResponse() for _ in range(count)]
    texts: list[list[str]] = [[] for _ in range(count)]
    for response in stream:
        texts[response.index].append(response.text)
        response.ClearField("text")
        response.ClearField("offset")
        answers[response.index].MergeFrom(response)
    for answer, text in zip(answers, texts, strict=True):
        answer.text = "".join(text)
    return answers
