"""Every rule of inference.proto: what is wrong is named, what is absent is filled in, what is not built is said."""

import math
from typing import Any

import pytest

from gateway import validate
from gateway.errors import CallError, Code
from gateway.validate import Checked, ModelLimits, SamplingDefaults
from kilburn.v1 import inference_pb2 as api

LIMITS = ModelLimits(context_length=64, vocab_size=100, eos_ids=(2, 7), defaults=SamplingDefaults())


def check(limits: ModelLimits = LIMITS, **fields: Any) -> Checked:
    fields.setdefault("text", "Hello")
    return validate.check(api.GenerateRequest(**fields), "default", limits, lambda: "drawn", lambda: 99)


def refused(**fields: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        check(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"request_id": "x" * 129}, "request_id", "129 characters"),
        ({"request_id": "naïve"}, "request_id", "ASCII"),
        ({"request_id": "a\x00b"}, "request_id", "ASCII"),
        ({"request_id": "a\nb"}, "request_id", "ASCII"),
        ({"request_id": "é" * 100_000}, "request_id", "100000 characters"),
        ({"cache_salt": "x" * 129}, "cache_salt", "129 characters"),
        ({"sampling": {"temperature": -0.5}}, "sampling.temperature", "is -0.5"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature", "is nan"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature", "is inf; it must be finite"),
        ({"sampling": {"top_p": -1}}, "sampling.top_p", "is -1"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p", "is 0"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p", "is 2"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p", "is nan"),
        ({"sampling": {"top_k": -2}}, "sampling.top_k", "is -2"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p", "is -0.1"),
        ({"sampling": {"min_p": 1.1}}, "sampling.min_p", "is 1.1"),
        ({"sampling": {"min_p": math.nan}}, "sampling.min_p", "is nan"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty", "is 0"),
        ({"sampling": {"repetition_penalty": math.inf}}, "sampling.repetition_penalty", "is inf; it must be finite"),
        ({"sampling": {"presence_penalty": 3}}, "sampling.presence_penalty", "is 3"),
        ({"sampling": {"frequency_penalty": math.nan}}, "sampling.frequency_penalty", "is nan"),
        ({"sampling": {"logit_bias": {5: 101.0}}}, "sampling.logit_bias[5]", "is 101"),
        ({"sampling": {"logit_bias": {5: math.nan}}}, "sampling.logit_bias[5]", "is nan"),
        ({"stopping": {"min_tokens": 5, "max_tokens": 4}}, "stopping.min_tokens", "is 5"),
        ({"stopping": {"min_tokens": 64}}, "stopping.min_tokens", "is 64"),
        ({"beam_width": 2, "sampling": {"repetition_penalty": 1.1}}, "sampling.repetition_penalty", "beam_width"),
        ({"beam_width": 2, "sampling": {"presence_penalty": 1}}, "sampling.presence_penalty", "beam_width"),
        ({"beam_width": 2, "sampling": {"frequency_penalty": 1}}, "sampling.frequency_penalty", "beam_width"),
        ({"beam_width": 2, "sampling": {"logit_bias": {5: 1}}}, "sampling.logit_bias", "beam_width"),
        ({"stopping": {"stop": ["x"] * 10_000}}, "stopping.stop", "10000 strings"),
        ({"stopping": {"stop": [""]}}, "stopping.stop", "empty string"),
        ({"stopping": {"stop": ["x" * 257]}}, "stopping.stop", "257 characters"),
        ({"stopping": {"stop_token_ids": range(100_000)}}, "stopping.stop_token_ids", "100000"),
        ({"output": {"logprobs": 21}}, "output.logprobs", "is 21"),
        ({"output": {"logprobs": 1_000_000}}, "output.logprobs", "is 1000000"),
        ({"resume_seconds": 601}, "resume_seconds", "is 601"),
        ({"length_penalty": math.nan}, "length_penalty", "is nan"),
        ({"n": 65}, "n", "is 65"),
        ({"n": 2**32 - 1}, "n", "is 4294967295"),
        ({"beam_width": 17}, "beam_width", "is 17"),
        ({"beam_width": 2, "n": 3}, "n", "at most as many"),
        ({"beam_width": 2, "sampling": {"temperature": 0}}, "sampling.temperature", "beam_width"),
        ({"beam_width": 2, "sampling": {"seed": 1}}, "sampling.seed", "beam_width"),
        ({"beam_width": 2, "stopping": {"stop": ["x"]}}, "stopping.stop", "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty", "beam_width"),
        ({"beam_width": 2, "length_penalty": 17}, "length_penalty", "at most 16"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty", "nan"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, Any], field: str, words: str) -> None:
    error = refused(**fields)
    assert error.code is Code.INVALID_VALUE
    assert error.field == field
    assert words in error.message
    assert field.partition("[")[0] in error.message
    assert len(error.message) <= 500
    assert error.message.isascii()


def test_what_is_not_built_is_said_at_once() -> None:
    error = refused(resume_seconds=1)
    assert error.code is Code.NOT_BUILT
    assert error.field == "resume_seconds"
    assert "resume_seconds" in error.message


def test_penalties_bias_and_the_least_number_of_tokens_are_taken() -> None:
    biases = {token: 1 - token / 50 for token in range(100)}
    fields = {"repetition_penalty": 1e-30, "presence_penalty": 2, "frequency_penalty": -2, "logit_bias": biases}
    checked = check(sampling=fields, stopping={"min_tokens": 63}, output={"prompt_logprobs": True})
    sampling = checked.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (2, -2)
    assert sampling.repetition_penalty == pytest.approx(1e-30)
    assert dict(sampling.logit_bias) == pytest.approx({token: bias for token, bias in biases.items() if bias})
    assert (checked.stopping.min_tokens, checked.prompt_logprobs) == (63, True)


def test_a_bias_of_too_many_tokens_is_refused_and_of_as_many_as_there_may_be_taken() -> None:
    limits = ModelLimits(64, 5000, (2,), SamplingDefaults())
    assert len(check(limits, sampling={"logit_bias": dict.fromkeys(range(1024), 1)}).sampling.logit_bias) == 1024
    with pytest.raises(CallError) as caught:
        check(limits, sampling={"logit_bias": dict.fromkeys(range(1025), 0)})
    assert (caught.value.code, caught.value.field) == (Code.INVALID_VALUE, "sampling.logit_bias")


def test_the_model_s_own_repetition_penalty_is_for_samples_and_not_for_beams() -> None:
    limits = ModelLimits(64, 100, (2,), SamplingDefaults(repetition_penalty=1.25))
    assert check(limits).sampling.repetition_penalty == 1.25
    assert check(limits, sampling={"repetition_penalty": 1}).sampling.repetition_penalty == 1
    assert check(limits, beam_width=2).sampling.repetition_penalty == 1


def test_tokens_that_all_end_leave_none_for_a_least_number() -> None:
    limits = ModelLimits(64, 3, (2,), SamplingDefaults())
    check(limits, stopping={"min_tokens": 1, "stop_token_ids": [0]})
    with pytest.raises(CallError) as caught:
        check(limits, stopping={"min_tokens": 1, "stop_token_ids": [0, 1]})
    assert caught.value.field == "stopping.min_tokens"


def test_nonsense_is_never_called_not_built_yet() -> None:
    assert refused(resume_seconds=2, sampling={"temperature": -1}).code is Code.INVALID_VALUE


def test_neutral_values_are_as_good_as_none() -> None:
    check(
        n=1,
        beam_width=1,
        length_penalty=1,
        sampling={"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {5: 0.0}},
    )


@pytest.mark.parametrize("prompt", [{"text": ""}, {"token_ids": {"ids": []}}, {"chat": {"messages": []}}])
def test_an_empty_prompt(prompt: dict[str, Any]) -> None:
    with pytest.raises(CallError) as caught:
        validate.check(api.GenerateRequest(**prompt), "default", LIMITS, lambda: "drawn", lambda: 99)
    assert caught.value.code is Code.EMPTY_PROMPT


def test_no_prompt_at_all() -> None:
    with pytest.raises(CallError) as caught:
        validate.check(api.GenerateRequest(), "default", LIMITS, lambda: "drawn", lambda: 99)
    assert caught.value.code is Code.EMPTY_PROMPT


def test_a_message_without_a_role() -> None:
    with pytest.raises(CallError) as caught:
        validate.check_chat(api.Chat(messages=[api.ChatMessage(role="user"), api.ChatMessage(content="x")]))
    assert caught.value.code is Code.BAD_CHAT
    assert "message 1" in caught.value.message


@pytest.mark.parametrize("text", [" ", "\x00", "\ufeff", "<|end|>"])
def test_strange_text_is_text(text: str) -> None:
    check(text=text)


@pytest.mark.parametrize("bad", [100, 2**31 - 1, 2**32 - 1])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    for call in (
        lambda: validate.check_prompt([1, bad, 3], LIMITS),
        lambda: check(stopping={"stop_token_ids": [bad]}),
        lambda: check(sampling={"logit_bias": {bad: 1.0}}),
    ):
        with pytest.raises(CallError) as caught:
            call()
        assert caught.value.code is Code.UNKNOWN_TOKEN
        assert str(bad) in caught.value.message


def test_the_edges_of_the_vocabulary_and_the_context_are_legal() -> None:
    validate.check_prompt([0, 99], LIMITS)
    validate.check_prompt([1] * 63, LIMITS)
    with pytest.raises(CallError) as caught:
        validate.check_prompt([1] * 64, LIMITS)
    assert caught.value.code is Code.PROMPT_TOO_LONG
    assert "64 tokens" in caught.value.message
    with pytest.raises(CallError) as caught:
        validate.check_prompt([], LIMITS)
    assert caught.value.code is Code.EMPTY_PROMPT


def test_absent_fields_take_the_protocol_s_defaults() -> None:
    checked = check()
    assert checked.request_id == "drawn"
    sampling = checked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert sampling.seed == 99
    assert sampling.top_logprobs is None
    assert checked.stopping.stop_token_ids == (2, 7)
    assert checked.stopping.max_tokens == 0


def test_absent_fields_take_the_model_s_values_first() -> None:
    limits = ModelLimits(64, 100, (), SamplingDefaults(temperature=0.25, top_p=0.5, top_k=20, min_p=0.125))
    sampling = check(limits).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 20, 0.125)
    explicit = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    sampling = check(limits, sampling=explicit).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0, 1, 0, 0, 0)


@pytest.mark.parametrize(("asked", "effective"), [(-1, 0), (0, 0), (1, 1), (99, 99), (100, 0), (2**31 - 1, 0)])
def test_top_k_off_is_zero(asked: int, effective: int) -> None:
    assert check(sampling={"top_k": asked}).sampling.top_k == effective


@pytest.mark.parametrize("temperature", [0.0, 1e6])
def test_extreme_temperatures_are_taken(temperature: float) -> None:
    assert check(sampling={"temperature": temperature}).sampling.temperature == temperature


@pytest.mark.parametrize(("asked", "expected"), [({}, None), ({"logprobs": 0}, 0), ({"logprobs": 20}, 20)])
def test_logprobs_absent_is_not_zero(asked: dict[str, int], expected: int | None) -> None:
    assert check(output=asked).sampling.top_logprobs == expected


def test_stop_ids_are_joined_with_the_model_s_own() -> None:
    assert check(stopping={"stop_token_ids": [5, 7, 5]}).stopping.stop_token_ids == (2, 7, 5)
    assert check(stopping={"stop_token_ids": [5, 7], "ignore_eos": True}).stopping.stop_token_ids == (5, 7)
    many = ModelLimits(64, 1000, tuple(range(20)), SamplingDefaults())
    assert len(check(many, stopping={"stop_token_ids": range(20, 128)}).stopping.stop_token_ids) == 128
    with pytest.raises(CallError) as caught:
        check(many, stopping={"stop_token_ids": range(20, 129)})
    assert "129" in caught.value.message


def test_the_largest_of_everything_is_taken() -> None:
    checked = check(
        request_id="r" * 128,
        cache_salt="é" * 128,
        priority=-(2**31),
        sampling={"seed": 2**64 - 1},
        stopping={"max_tokens": 2**32 - 1, "stop": [chr(97 + number) * 256 for number in range(16)]},
    )
    assert checked.sampling.seed == 2**64 - 1
    assert len(checked.stopping.stop) == 16


@pytest.mark.parametrize(
    ("metadata", "tenant"),
    [(None, "default"), ([], "default"), ([("x", "y")], "default"), ([("kilburn-tenant", "acme co")], "acme co")],
)
def test_the_tenant_is_the_metadata_s(metadata: list[tuple[str, str]] | None, tenant: str) -> None:
    assert validate.tenant_of(metadata) == tenant


@pytest.mark.parametrize(
    "metadata",
    [
        [("kilburn-tenant", "")],
        [("kilburn-tenant", "x" * 129)],
        [("kilburn-tenant", "   ")],
        [("kilburn-tenant", b"\xff\xfe")],
        [("kilburn-tenant", "a"), ("kilburn-tenant", "b")],
    ],
)
def test_a_tenant_that_can_not_be(metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(CallError) as caught:
        validate.tenant_of(metadata)
    assert caught.value.field == "kilburn-tenant"


def test_codes_are_distinct_and_plain() -> None:
    slugs = [code.slug for code in Code]
    assert len(set(slugs)) == len(slugs)
    assert all(slug.isascii() and slug.replace("-", "").islower() for slug in slugs)
