"""From what a client wrote to what the engine takes: every field checked, every default filled in. Pure.

Knows the rules of inference.proto and the limits of the model; not tokenizers, sockets or calls. A field that is wrong gives a
CallError that names it and its value. What the protocol has and this version has not gives NOT_BUILT, but only where it would
change something: an explicit neutral value is as good as none.

Order of the checks: the range of every field first, then what is not built, so that nonsense is never called "not built yet".
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.errors import CallError, Code, quoted
from kilburn.limits import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIASES,
    MAX_NAME_CHARACTERS,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from kilburn.names import TENANT_KEY, fault_of_name, tenant_in
from kilburn.v1 import inference_pb2 as api

#: Stop strings of one request, and the characters of each: what is held back of a stream is less than one of them.
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 256

#: How long a request may be kept for Attach.
MAX_RESUME_SECONDS: Final = 600

_MAX_PENALTY: Final = 2.0
_MAX_LOGIT_BIAS: Final = 100.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an absent sampling field means: the model's own value, else the protocol's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    context_length: int  # tokens, prompt and output
    vocab_size: int
    eos_ids: tuple[int, ...]  # every end of sequence that the model has
    defaults: SamplingDefaults


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token; nothing is left to default. `top_k` 0 is off; what has a bias has one that is not 0."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    top_logprobs: int | None  # None: no log-probabilities at all
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an index ends. `max_tokens` 0: at the context's end. Nothing but that ends it before it has `min_tokens`."""

    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # ends of sequence among them, unless they are ignored
    include_stop: bool
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Checked:
    """A request without its prompt, ready to be submitted."""

    request_id: str
    tenant: str
    sampling: Sampling
    stopping: Stopping
    echo: bool
    keep_special_tokens: bool
    priority: int
    cache_salt: str
    samples: int  # from 1
    beams: int  # 0: none
    length_penalty: float
    prompt_logprobs: bool = False


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the tenant that a call's metadata names.

    Raises:
        CallError: it names one that can't be, or more than one.
    """
    tenant, fault = tenant_in(metadata)
    if fault:
        raise CallError(Code.INVALID_VALUE, fault, TENANT_KEY)
    return tenant


def check(
    request: api.GenerateRequest,
    tenant: str,
    limits: ModelLimits,
    draw_id: Callable[[], str],
    draw_seed: Callable[[], int],
) -> Checked:
    """Check everything but the prompt's ids; `draw_id` and `draw_seed` serve requests that name none.

    Raises:
        CallError: a field is out of range, there is no prompt, or something is asked for that is not built.
    """
    request_id = _name(request.request_id, "request_id") if request.request_id else draw_id()
    if request.n > MAX_SAMPLES:
        raise _invalid("n", f"is {request.n}; at most {MAX_SAMPLES} sequences are made of one prompt")
    if len(request.cache_salt) > MAX_NAME_CHARACTERS:
        raise _invalid("cache_salt", f"has {len(request.cache_salt)} characters; at most {MAX_NAME_CHARACTERS} are taken")
    _check_rest(request)
    sampling = _sampling(request, limits, draw_seed)
    stopping = _stopping(request.stopping, limits)
    _check_input(request)
    _check_built(request)
    return Checked(
        request_id=request_id,
        tenant=tenant,
        sampling=sampling,
        stopping=stopping,
        echo=request.output.echo,
        keep_special_tokens=request.output.keep_special_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
        samples=request.n or 1,
        beams=_beams(request, stopping, limits),
        length_penalty=request.length_penalty if request.HasField("length_penalty") else 1.0,
        prompt_logprobs=request.output.prompt_logprobs,
    )


def check_request_id(request_id: str) -> str:
    """Return the id that a Cancel or Attach names.

    Raises:
        CallError: no request can have it.
    """
    return _name(request_id, "request_id")


def check_prompt(ids: Sequence[int], limits: ModelLimits) -> None:
    """Check the prompt as the model will see it.

    Raises:
        CallError: it is empty, leaves no room for one token of output, or has an id outside the vocabulary.
    """
    if not ids:
        raise CallError(Code.EMPTY_PROMPT, "the prompt is empty: it has no tokens", "input")
    if len(ids) >= limits.context_length:
        raise CallError(
            Code.PROMPT_TOO_LONG,
            f"the prompt has {len(ids)} tokens; with one token of output the context holds {limits.context_length - 1}",
            "input",
        )
    check_ids(ids, limits.vocab_size, "token_ids")


def check_least_tokens(least: int, limits: ModelLimits) -> None:
    """Refuse a text by the least number of tokens that it has, before seconds and hundreds of megabytes go into finding them.

    Raises:
        CallError: it can't fit.
    """
    if least >= limits.context_length:
        raise CallError(
            Code.PROMPT_TOO_LONG,
            f"the prompt has at least {least} tokens; with one token of output the context holds {limits.context_length - 1}",
            "input",
        )


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that ids are of the vocabulary.

    Raises:
        CallError: one is not.
    """
    # The maximum first: a loop in C for the usual case, where all is well.
    if ids and max(ids) >= vocab_size:
        bad = next(token for token in ids if token >= vocab_size)
        raise CallError(Code.UNKNOWN_TOKEN, f"{field}: {bad} is no token; the vocabulary is 0 to {vocab_size - 1}", field)


def _sampling(request: api.GenerateRequest, limits: ModelLimits, draw_seed: Callable[[], int]) -> Sampling:
    asked, defaults = request.sampling, limits.defaults
    logprobs = request.output.logprobs if request.output.HasField("logprobs") else None
    if logprobs is not None and logprobs > MAX_TOP_LOGPROBS:
        raise _invalid("output.logprobs", f"is {logprobs}; at most {MAX_TOP_LOGPROBS} alternatives are given")
    top_k = asked.top_k if asked.HasField("top_k") else defaults.top_k
    repetition = asked.repetition_penalty if asked.HasField("repetition_penalty") else defaults.repetition_penalty
    return Sampling(
        temperature=check_temperature(asked.temperature if asked.HasField("temperature") else defaults.temperature),
        top_p=check_top_p(asked.top_p if asked.HasField("top_p") else defaults.top_p),
        top_k=_effective_top_k(check_top_k(top_k), limits.vocab_size),
        min_p=check_min_p(asked.min_p if asked.HasField("min_p") else defaults.min_p),
        seed=asked.seed if asked.HasField("seed") else draw_seed(),
        top_logprobs=logprobs,
        # The model's own is not for beams: they are searched by what the model says.
        repetition_penalty=check_repetition_penalty(repetition) if request.beam_width <= 1 else 1.0,
        presence_penalty=_check_penalty("sampling.presence_penalty", asked.presence_penalty),
        frequency_penalty=_check_penalty("sampling.frequency_penalty", asked.frequency_penalty),
        logit_bias=_logit_bias(asked.logit_bias, limits),
    )


def _logit_bias(asked: Mapping[int, float], limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    if len(asked) > MAX_LOGIT_BIASES:  # before anything is made of them: a message has room for hundreds of thousands
        raise _invalid("sampling.logit_bias", f"has {len(asked)} tokens; at most {MAX_LOGIT_BIASES} are taken")
    for token, bias in asked.items():
        check_ids((token,), limits.vocab_size, "sampling.logit_bias")
        _in_range(f"sampling.logit_bias[{token}]", bias, -_MAX_LOGIT_BIAS <= bias <= _MAX_LOGIT_BIAS, "-100 to 100")
    return tuple(sorted((token, bias) for token, bias in asked.items() if bias))


def _beams(request: api.GenerateRequest, stopping: Stopping, limits: ModelLimits) -> int:
    """Return the width of the search, 0 for none."""
    width = request.beam_width
    if width > MAX_BEAM_WIDTH:
        raise _invalid("beam_width", f"is {width}; at most {MAX_BEAM_WIDTH} beams are searched with")
    if width <= 1:
        if request.HasField("length_penalty") and request.length_penalty != 1:
            raise _invalid("length_penalty", "is for beams; give a beam_width above 1 with it")
        return 0
    if request.n > width:
        raise _invalid("n", f"is {request.n}; a search with {width} beams returns at most as many")
    named = [f"sampling.{field.name}" for field, _ in request.sampling.ListFields()]
    named += ["stopping.stop"] if request.stopping.stop else []
    if named:
        raise CallError(Code.INVALID_VALUE, f"{named[0]} has no meaning with beam_width; leave it out", named[0])
    if width + len(stopping.stop_token_ids) > limits.vocab_size:
        raise _invalid("beam_width", f"is {width}; a vocabulary of {limits.vocab_size} tokens is too small for it")
    return width


def check_temperature(value: float) -> float:
    """Return a temperature that can be used, 0 or more, or refuse it."""
    return _in_range("sampling.temperature", value, value >= 0, "0 (greedy) or more")


def check_top_p(value: float) -> float:
    """Return a top-p that can be used, in (0, 1], or refuse it."""
    return _in_range("sampling.top_p", value, 0 < value <= 1, "more than 0 and at most 1")


def check_min_p(value: float) -> float:
    """Return a min-p that can be used, in [0, 1], or refuse it."""
    return _in_range("sampling.min_p", value, 0 <= value <= 1, "0 to 1")


def check_repetition_penalty(value: float) -> float:
    """Return a repetition penalty that can be used, more than 0, or refuse it."""
    return _in_range("sampling.repetition_penalty", value, value > 0, "more than 0")


def _check_penalty(field: str, value: float) -> float:
    return _in_range(field, value, -_MAX_PENALTY <= value <= _MAX_PENALTY, "-2 to 2")


def check_top_k(value: int) -> int:
    """Return a top-k that can be used, -1 or more, or refuse it."""
    if value < -1:
        raise _invalid("sampling.top_k", f"is {value}; it must be 1 or more, or 0 or -1 for off")
    return value


def _effective_top_k(top_k: int, vocab_size: int) -> int:
    return top_k if 1 <= top_k < vocab_size else 0


def _stopping(asked: api.Stopping, limits: ModelLimits) -> Stopping:
    if len(asked.stop) > MAX_STOP_STRINGS:
        raise _invalid("stopping.stop", f"has {len(asked.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    for stop in asked.stop:
        if not stop:
            raise _invalid("stopping.stop", "has an empty string")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise _invalid("stopping.stop", f"{quoted(stop)} has {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are taken")
    # Counted before anything is made of them: a message has room for a million.
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _too_many_stop_ids(len(asked.stop_token_ids))
    check_ids(asked.stop_token_ids, limits.vocab_size, "stopping.stop_token_ids")
    own = () if asked.ignore_eos else limits.eos_ids
    merged = tuple(dict.fromkeys([*own, *asked.stop_token_ids]))
    if len(merged) > MAX_STOP_TOKEN_IDS:
        raise _too_many_stop_ids(len(merged))
    least = asked.min_tokens
    if asked.max_tokens and least > asked.max_tokens:
        raise _invalid("stopping.min_tokens", f"is {least}; stopping.max_tokens is {asked.max_tokens}, which is less")
    if least >= limits.context_length:
        raise _invalid("stopping.min_tokens", f"is {least}; the context holds {limits.context_length} tokens with the prompt")
    if least and len(merged) >= limits.vocab_size:
        raise _invalid("stopping.min_tokens", f"is {least}; every token of the vocabulary would end the output")
    return Stopping(
        max_tokens=asked.max_tokens,
        stop=tuple(dict.fromkeys(asked.stop)),
        stop_token_ids=merged,
        include_stop=asked.include_stop,
        min_tokens=least,
    )


def _too_many_stop_ids(count: int) -> CallError:
    return _invalid(
        "stopping.stop_token_ids",
        f"are {count} with the model's own ends of sequence; at most {MAX_STOP_TOKEN_IDS} are taken",
    )


def _check_rest(request: api.GenerateRequest) -> None:
    """Check the ranges of what belongs to nothing else."""
    if request.HasField("length_penalty"):
        penalty = request.length_penalty
        _in_range("length_penalty", penalty, abs(penalty) <= MAX_LENGTH_PENALTY, f"at most {MAX_LENGTH_PENALTY:g}, either way")
    if request.resume_seconds > MAX_RESUME_SECONDS:
        raise _invalid("resume_seconds", f"is {request.resume_seconds}; at most {MAX_RESUME_SECONDS} are taken")


def _check_input(request: api.GenerateRequest) -> None:
    kind = request.WhichOneof("input")
    if kind is None or (kind == "text" and not request.text) or (kind == "token_ids" and not request.token_ids.ids):
        raise CallError(Code.EMPTY_PROMPT, f"the prompt is empty: {_which(kind)}", "input")
    if kind == "chat":
        check_chat(request.chat)


def check_chat(chat: api.Chat) -> None:
    """Check a conversation before it is rendered.

    Raises:
        CallError: it has no messages, or one without a role.
    """
    if not chat.messages:
        raise CallError(Code.EMPTY_PROMPT, "the prompt is empty: the chat has no messages", "chat.messages")
    for number, message in enumerate(chat.messages):
        if not message.role:
            raise CallError(Code.BAD_CHAT, f"message {number} of the chat has no role", "chat.messages")


def _which(kind: str | None) -> str:
    return f"{kind} is" if kind else "set one of text, token_ids and chat"


def _check_built(request: api.GenerateRequest) -> None:
    if request.resume_seconds:
        raise CallError(Code.NOT_BUILT, "resume_seconds is not built yet; leave it out", "resume_seconds")


def _name(text: str, field: str) -> str:
    fault = fault_of_name(text)
    if fault:
        raise _invalid(field, fault)
    return text


def _in_range(field: str, value: float, is_inside: bool, range_in_words: str) -> float:
    if not math.isfinite(value):
        raise _invalid(field, f"is {value:g}; it must be finite")
    if not is_inside:
        raise _invalid(field, f"is {value:g}; it must be {range_in_words}")
    return value


def _invalid(field: str, text: str) -> CallError:
    return CallError(Code.INVALID_VALUE, f"{field} {text}", field)
