"""What peers send wrong gets a typed error before anything acts on it; what we send says what was decided."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.limits import MAX_BLOCK_SIZE, MAX_NAME_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, PROTOCOL
from kilburn.v1 import engine_pb2 as engine
from kilburn.v1 import inference_pb2 as inference
from memmgr.core.table import StepMemory
from memmgr.messages import (
    MAX_BLOCKS,
    MessageError,
    check_hello,
    read_result,
    read_submit,
    read_told,
    step_plan,
    token_batches,
)
from memmgr.schedule.beams import Choice
from memmgr.schedule.plans import (
    EndCode,
    Event,
    FinishReason,
    NewToken,
    Plan,
    PlannedChunk,
    PlannedSample,
    PlannedTelling,
    PromptTold,
    RequestEnd,
    Sampled,
    SequenceEnd,
    Submission,
)
from tests.memmgr.memmgr_messages import VOCABULARY, hello, sampling, submit

FOREVER = float("inf")
LONG = "x" * (MAX_NAME_CHARACTERS + 1)


# ------------------------------------------------------------------------------------------------------------ Submit


def test_a_submit_is_read() -> None:
    message = submit(3, stop_token_ids=[7, 8, 7], priority=-4, cache_salt="salt", max_tokens=9)
    assert read_submit(message, 11, VOCABULARY, 12.5) == Submission(
        key=(11, 3),
        tenant="default",
        request_id="request-3",
        prompt=array("I", [1, 2, 3]),
        sampling=message.sampling,
        max_tokens=9,
        stop_token_ids=frozenset({7, 8}),
        priority=-4,
        salt="salt",
        deadline=12.5,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tenant": ""}, "without a tenant"),
        ({"request_id": ""}, "without a tenant or an id"),
        ({"tenant": LONG}, "a tenant of 129"),
        ({"request_id": LONG}, "a request id of 129"),
        ({"cache_salt": LONG}, "a cache salt of 129"),
        ({"prompt_ids": []}, "empty prompt"),
        ({"prompt_ids": [1, VOCABULARY]}, f"token id {VOCABULARY} is outside"),
        ({"prompt_ids": [2**32 - 1]}, "outside the vocabulary"),
        ({"stop_token_ids": range(MAX_STOP_TOKEN_IDS + 1)}, "stop token ids"),
        ({"sampling": sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": sampling(temperature=float("inf"))}, "temperature"),
        ({"sampling": sampling(top_p=0.0)}, "top_p"),
        ({"sampling": sampling(top_p=1.5)}, "top_p"),
        ({"sampling": sampling(top_p=float("nan"))}, "top_p"),
        ({"sampling": sampling(repetition_penalty=-1.0)}, "penalty"),
        ({"sampling": sampling(presence_penalty=float("nan"))}, "penalty"),
        ({"sampling": sampling(frequency_penalty=float("inf"))}, "penalty"),
        ({"sampling": sampling(logit_bias={1: float("nan")})}, "bias"),
        ({"sampling": sampling(logit_bias={VOCABULARY: 1.0})}, "outside the vocabulary"),
        ({"sampling": sampling(logit_bias=dict.fromkeys(range(1025), 1.0))}, "too many"),
        ({"sampling": sampling(unwanted_ids=[VOCABULARY])}, "outside the vocabulary"),
        ({"sampling": sampling(unwanted_ids=[1] * (MAX_STOP_TOKEN_IDS + 1))}, "too many"),
        ({"sampling": sampling(min_p=-0.5)}, "min_p"),
        ({"sampling": sampling(min_p=1.5)}, "min_p"),
        ({"sampling": sampling(min_p=float("nan"))}, "min_p"),
        ({"sampling": sampling(top_logprobs=MAX_TOP_LOGPROBS + 1)}, "alternatives"),
        ({"sampling": None}, "top_p"),
    ],
)
def test_a_malformed_submit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError, match=reason) as raised:
        read_submit(submit(**changes), 1, VOCABULARY, FOREVER)
    assert "\n" not in str(raised.value)


def test_a_deadline_that_is_no_number_is_refused() -> None:
    """In the heap of deadlines it would hold up everybody's."""
    with pytest.raises(MessageError, match="deadline"):
        read_submit(submit(), 1, VOCABULARY, float("nan"))


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "t" * MAX_NAME_CHARACTERS, "request_id": "ü" * MAX_NAME_CHARACTERS},
        {"prompt_ids": [0, VOCABULARY - 1]},
        {"stop_token_ids": [2**32 - 1]},  # an id that the model has no row for never comes
        {"sampling": sampling(temperature=1e9, min_p=1.0, top_k=2**32 - 1, seed=2**64 - 1, top_logprobs=MAX_TOP_LOGPROBS)},
        {"max_tokens": 0},
        {"max_tokens": 2**32 - 1},
        {"priority": -(2**31)},
    ],
)
def test_what_is_at_the_edge_is_taken(changes: dict[str, Any]) -> None:
    assert read_submit(submit(**changes), 1, VOCABULARY, FOREVER).deadline == FOREVER


# ------------------------------------------------------------------------------------------------------------- hello


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, "speaks protocol"),
        ({"protocol": 0}, "speaks protocol"),
        ({"block_size": 0}, "blocks of 0 tokens"),
        ({"block_size": MAX_BLOCK_SIZE + 1}, "blocks of"),
        ({"total_blocks": 0}, "has 0 blocks"),
        ({"total_blocks": MAX_BLOCKS + 1}, "blocks; 1 to"),
        ({"context_length": 65}, "does not fit a pool of 64"),
        ({"context_length": 1}, "context of 1"),
        ({"context_length": 0}, "context of 0"),
        ({"max_slots": 0}, "no sequence"),
        ({"max_step_tokens": 0}, "no sequence"),
        ({"vocab_size": 0}, "no sequence"),
    ],
)
def test_an_executor_that_cannot_be_worked_with_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        check_hello(hello(**changes))


@pytest.mark.parametrize(
    "changes", [{}, {"block_size": 1, "total_blocks": 64}, {"block_size": MAX_BLOCK_SIZE, "context_length": 2}]
)
def test_an_executor_that_can_is_not(changes: dict[str, Any]) -> None:
    check_hello(hello(**changes))


# ------------------------------------------------------------------------------------------------------------ result


def samples(count: int) -> list[PlannedSample]:
    return [PlannedSample(0, slot, 0) for slot in range(count)]


def told(ids: list[int], logprobs: list[float], sample: int = 0) -> engine.StepResult:
    choices = engine.SampleChoices(sample=sample, token_ids=ids, logprobs=logprobs)
    return engine.StepResult(step=1, token_ids=[0], choices=[choices])


def test_choices_are_read_with_what_is_to_be_told_of_them() -> None:
    result = told([7, 3, 5], [-0.5, -1.0, -1.0])
    (plain,) = read_result(result, [PlannedSample(0, 0, 4, choices=3)], VOCABULARY)
    assert plain.choices == (Choice(7, -0.5), Choice(3, -1.0), Choice(5, -1.0))
    (told_of,) = read_result(result, [PlannedSample(0, 0, 4, choices=3, alternatives=2)], VOCABULARY)
    top = [inference.Alternative(token_id=7, logprob=-0.5), inference.Alternative(token_id=3, logprob=-1.0)]
    assert [choice.detail for choice in told_of.choices] == [
        inference.TokenLogprob(token_id=7, logprob=-0.5, rank=1, top=top),
        inference.TokenLogprob(token_id=3, logprob=-1.0, rank=2, top=top),
        inference.TokenLogprob(token_id=5, logprob=-1.0, rank=2, top=top),
    ]


def test_a_failed_sample_has_no_choices() -> None:
    result = engine.StepResult(step=1, token_ids=[0], failed=[0])
    assert list(read_result(result, [PlannedSample(0, 0, 0, choices=3)], VOCABULARY)) == [Sampled(0, failed=True)]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (engine.StepResult(step=1, token_ids=[0]), "0 choices and 0"),
        (told([1, 2, 3], [-1.0, -2.0, -3.0], sample=1), "0 choices and 0"),
        (told([1, 2], [-1.0, -2.0]), "2 choices"),
        (told([1, 2, 3], [-1.0, -2.0]), "2 log-probabilities"),
        (told([1, 2, 2], [-1.0, -2.0, -3.0]), "twice"),
        (told([1, 2, VOCABULARY], [-1.0, -2.0, -3.0]), "outside the vocabulary"),
        (told([1, 2, 3], [-1.0, float("nan"), -3.0]), "no number"),
        (told([1, 2, 3], [float("inf"), -1.0, -3.0]), "no number"),
    ],
)
def test_choices_that_were_not_asked_for_are_refused(result: engine.StepResult, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        read_result(result, [PlannedSample(0, 0, 0, choices=3)], VOCABULARY)


def test_a_result_is_read() -> None:
    logprob = inference.TokenLogprob(token_id=6, logprob=-0.5)
    result = engine.StepResult(
        step=1, token_ids=[5, 6, 2**31], failed=[2], logprobs=[engine.SampleLogprob(sample=1, logprob=logprob)]
    )
    assert list(read_result(result, samples(3), VOCABULARY)) == [
        Sampled(5),
        Sampled(6, logprob=logprob),
        Sampled(2**31, failed=True),
    ]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_result_with_another_number_of_samples_is_refused(tokens: list[int]) -> None:
    with pytest.raises(MessageError, match="tokens for 2 samples"):
        read_result(engine.StepResult(step=1, token_ids=tokens), samples(2), VOCABULARY)


def test_a_result_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(MessageError, match="outside"):
        read_result(engine.StepResult(step=1, token_ids=[VOCABULARY]), samples(1), VOCABULARY)


# ------------------------------------------------------------------------------------------------------- what we send


def test_a_plan_says_all_of_it() -> None:
    plan = Plan(
        step=9,
        memory=StepMemory(copies=((1, 2), (1, 3)), freed=(4, 5)),
        closes=(6,),
        opens=((7, sampling(top_k=3), 2),),
        chunks=(
            PlannedChunk(7, 0, 2, array("I", [10, 11]), (8, 9), ()),
            PlannedChunk(1, 5, 1, None, (), ((1, 3),)),
        ),
        samples=(PlannedSample(0, 7, 0), PlannedSample(1, 1, 4)),
    )
    assert step_plan(plan) == engine.StepPlan(
        step=9,
        copies=[engine.BlockCopy(source=1, destination=2), engine.BlockCopy(source=1, destination=3)],
        closes=[6],
        opens=[engine.SlotOpen(slot=7, sampling=sampling(top_k=3), index=2)],
        chunks=[
            engine.Chunk(slot=7, start=0, token_ids=[10, 11], new_blocks=[8, 9]),
            engine.Chunk(slot=1, start=5, edits=[engine.TableEdit(logical=1, block=3)]),
        ],
        samples=[engine.SampleRow(chunk=0, slot=7, position=0), engine.SampleRow(chunk=1, slot=1, position=4)],
        freed_blocks=[4, 5],
    )


def test_a_submit_with_penalties_keeps_which_tokens_its_prompt_has() -> None:
    plain = read_submit(submit(1), 11, VOCABULARY, FOREVER)
    assert (plain.counts_tokens, plain.prompt_seen, plain.prompt_alternatives) == (False, b"", None)
    ids = {"prompt_ids": [9, 0, 2, 9]}
    repeated = read_submit(submit(1, sampling=sampling(repetition_penalty=1.5), **ids), 11, VOCABULARY, FOREVER)
    assert (repeated.counts_tokens, repeated.prompt_seen) == (True, bytes([0b101, 0b10]))
    for penalty in ("presence_penalty", "frequency_penalty"):
        counted = read_submit(submit(1, sampling=sampling(**{penalty: -1.0}), **ids), 11, VOCABULARY, FOREVER)
        assert (counted.counts_tokens, counted.prompt_seen) == (True, b"")
    told = read_submit(submit(1, sampling=sampling(top_logprobs=3), prompt_logprobs=True), 11, VOCABULARY, FOREVER)
    assert told.prompt_alternatives == 3


def test_histories_and_what_is_to_be_told_of_prompts_are_planned() -> None:
    plan = Plan(
        step=1,
        memory=StepMemory((), ()),
        closes=(),
        opens=((3, sampling(), 0),),
        chunks=(PlannedChunk(3, 4, 2, array("I", [5, 6]), (), ()),),
        samples=(),
        histories=((3, b"\x05", array("I", [9, 2, 9, 7])), (4, b"", array("I"))),
        tellings=(PlannedTelling(0, 1, array("I", [8]), 2),),
    )
    message = step_plan(plan)
    assert list(message.histories) == [
        engine.History(slot=3, prompt_seen=b"\x05", output_gaps=[2, 5, 2], output_counts=[1, 1, 2]),
        engine.History(slot=4),
    ]
    assert list(message.prompt_rows) == [engine.PromptRows(chunk=0, first=1, targets=[8], top_logprobs=2)]


def test_what_is_told_of_prompts_is_what_was_asked_for() -> None:
    tellings = (PlannedTelling(0, 0, array("I", [8, 9]), 1),)
    good = [inference.TokenLogprob(token_id=token, top=[inference.Alternative(token_id=1)]) for token in (8, 9)]

    def told(*prompts: list[inference.TokenLogprob]) -> list[tuple[object, ...]]:
        parts = [engine.PromptLogprobs(logprobs=prompt) for prompt in prompts]
        return read_told(engine.StepResult(step=1, prompts=parts), tellings, VOCABULARY)

    assert told(good) == [tuple(good)]
    outside = [good[0], inference.TokenLogprob(token_id=9, top=[inference.Alternative(token_id=VOCABULARY)])]
    for bad in ([], [good, good], [good[:1]], [good[::-1]], [outside]):
        with pytest.raises(MessageError):
            told(*bad)


def test_what_is_told_of_a_prompt_comes_before_its_sequence() -> None:
    told = [inference.TokenLogprob(token_id=token) for token in (8, 9)]
    events: list[Event] = [PromptTold((5, 1), tuple(told)), NewToken((5, 1), 0, 0, 7, None)]
    (batch,) = token_batches(events).values()
    assert [list(part.prompt_logprobs) for part in batch.sequences] == [told, []]
    assert [list(part.token_ids) for part in batch.sequences] == [[], [7]]


def test_one_batch_for_each_gateway() -> None:
    logprob = inference.TokenLogprob(token_id=21, logprob=-1.0)
    batches = token_batches(
        [
            NewToken((1, 5), 0, 3, 20, None),
            NewToken((2, 5), 0, 0, 21, logprob),
            NewToken((1, 6), 0, 0, 22, None),
            NewToken((1, 5), 0, 4, 23, None),
            SequenceEnd((1, 5), 0, 5, FinishReason.LENGTH),
            RequestEnd((1, 5), EndCode.OK, "", 2, 1, 0.5),
            SequenceEnd((1, 9), 0, 7, FinishReason.STOP),
            RequestEnd((2, 8), EndCode.QUEUE_FULL, "later"),
        ]
    )
    assert batches == {
        1: engine.TokenBatch(
            sequences=[
                engine.SequenceTokens(handle=5, offset=3, token_ids=[20, 23], finish_reason=inference.FINISH_REASON_LENGTH),
                engine.SequenceTokens(handle=6, offset=0, token_ids=[22]),
                engine.SequenceTokens(handle=9, offset=7, finish_reason=inference.FINISH_REASON_STOP),
            ],
            ends=[engine.RequestEnd(handle=5, cached_tokens=2, preemptions=1, queue_seconds=0.5)],
        ),
        2: engine.TokenBatch(
            sequences=[engine.SequenceTokens(handle=5, offset=0, token_ids=[21], logprobs=[logprob])],
            ends=[engine.RequestEnd(handle=8, error=engine.ERROR_CODE_QUEUE_FULL, message="later")],
        ),
    }
    assert token_batches([]) == {}


def test_our_numbers_are_those_of_the_protocol() -> None:
    assert {f"ERROR_CODE_{code.name}": code.value for code in EndCode} == dict(engine.ErrorCode.items())
    ours = {f"FINISH_REASON_{reason.name}": reason.value for reason in FinishReason}
    assert ours.items() <= dict(inference.FinishReason.items()).items()


@given(st.binary(max_size=200))
def test_whatever_can_be_parsed_is_read_or_refused(frame: bytes) -> None:
    try:
        message = engine.Submit.FromString(frame)
    except Exception:
        return
    try:
        submission = read_submit(message, 1, VOCABULARY, FOREVER)
    except MessageError:
        return
    assert submission.prompt
