"""Between the scheduler's values and the messages of engine.proto: what comes in is checked here, before anything acts on it.

Knows both vocabularies; no sockets, no state.
"""

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kilburn.errors import KilburnError
from kilburn.limits import (
    MAX_BEAM_WIDTH,
    MAX_BLOCK_SIZE,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIASES,
    MAX_NAME_CHARACTERS,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    PROTOCOL,
)
from kilburn.v1 import engine_pb2 as engine
from kilburn.v1 import inference_pb2 as inference
from memmgr.schedule.beams import Choice
from memmgr.schedule.plans import (
    Event,
    NewToken,
    Plan,
    PlannedSample,
    PlannedTelling,
    PromptTold,
    RequestEnd,
    RequestKey,
    Sampled,
    SequenceEnd,
    Submission,
)

#: Blocks of one pool: 32 TiB at 256 KiB each. Their state is allocated at the hello, some 80 bytes a block.
MAX_BLOCKS: Final = 2**27


class MessageError(KilburnError):
    """A peer's message that can't be acted on; the text says why."""


# -------------------------------------------------------------------------------------------------- from gateways


def read_submit(submit: engine.Submit, gateway: int, vocab_size: int, deadline: float) -> Submission:
    """Return the submission in a Submit. The gateway has checked what its client sent; this trusts no gateway.

    Raises:
        MessageError: a field is out of its range.
    """
    for what, text in ("tenant", submit.tenant), ("request id", submit.request_id), ("cache salt", submit.cache_salt):
        if len(text) > MAX_NAME_CHARACTERS:
            raise MessageError(f"a {what} of {len(text)} characters; at most {MAX_NAME_CHARACTERS} are taken")
    if not submit.tenant or not submit.request_id:
        raise MessageError("a request without a tenant or an id")
    if not submit.prompt_ids:
        raise MessageError("an empty prompt")
    if not 1 <= submit.samples <= MAX_SAMPLES:
        raise MessageError(f"{submit.samples} sequences; 1 to {MAX_SAMPLES} are made of one prompt")
    if submit.beam_width > 1:
        _check_beams(submit, vocab_size)
    if len(submit.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise MessageError(f"{len(submit.stop_token_ids)} stop token ids; at most {MAX_STOP_TOKEN_IDS} are taken")
    highest = max(submit.prompt_ids)
    if highest >= vocab_size:
        raise MessageError(f"token id {highest} is outside the vocabulary of {vocab_size}")
    if math.isnan(deadline):
        raise MessageError("a deadline that is no number")
    _check_sampling(submit.sampling, vocab_size)
    sampling = submit.sampling
    counts_prompt = sampling.repetition_penalty not in (0, 1) and submit.beam_width <= 1
    counts_outputs = bool(sampling.presence_penalty or sampling.frequency_penalty) and submit.beam_width <= 1
    return Submission(
        key=(gateway, submit.handle),
        tenant=submit.tenant,
        request_id=submit.request_id,
        prompt=array("I", submit.prompt_ids),
        sampling=submit.sampling,
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        samples=submit.samples,
        beam_width=submit.beam_width,
        length_penalty=submit.length_penalty if submit.beam_width > 1 else 1.0,
        alternatives=submit.sampling.top_logprobs if submit.sampling.with_logprobs else None,
        prompt_alternatives=submit.sampling.top_logprobs if submit.prompt_logprobs else None,
        counts_tokens=counts_prompt or counts_outputs,
        prompt_seen=_bits(submit.prompt_ids) if counts_prompt else b"",
        priority=submit.priority,
        salt=submit.cache_salt,
        deadline=deadline,
    )


def _check_beams(submit: engine.Submit, vocab_size: int) -> None:
    if not submit.samples <= submit.beam_width <= MAX_BEAM_WIDTH:
        raise MessageError(f"{submit.samples} of {submit.beam_width} beams; at most {MAX_BEAM_WIDTH} are searched with")
    if submit.beam_width + len(submit.stop_token_ids) > vocab_size:
        raise MessageError(f"{submit.beam_width} beams need more tokens that go on than a vocabulary of {vocab_size} has")
    if not abs(submit.length_penalty) <= MAX_LENGTH_PENALTY:
        raise MessageError(f"a length penalty of {submit.length_penalty}; it is at most {MAX_LENGTH_PENALTY:g}, either way")


def _bits(tokens: Iterable[int]) -> bytes:
    """Return a set of tokens as History.prompt_seen has it."""
    distinct = set(tokens)
    bits = bytearray(max(distinct) // 8 + 1)
    for token in distinct:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def _check_sampling(sampling: engine.SamplingParams, vocab_size: int) -> None:
    """Refuse what would make the executor fail for everybody."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise MessageError("a temperature that is negative or no number")
    if not 0 < sampling.top_p <= 1:
        raise MessageError("a top_p outside (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise MessageError("a min_p outside [0, 1]")
    if sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise MessageError(f"{sampling.top_logprobs} alternatives; at most {MAX_TOP_LOGPROBS} are given")
    bias = sampling.logit_bias
    if len(bias) > MAX_LOGIT_BIASES or len(sampling.unwanted_ids) > MAX_STOP_TOKEN_IDS:
        raise MessageError(f"{len(bias)} biases and {len(sampling.unwanted_ids)} unwanted tokens; that is too many")
    numbers = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, *bias.values())
    if not all(map(math.isfinite, numbers)) or sampling.repetition_penalty < 0:
        raise MessageError("a penalty or a bias that is no number, or a repetition penalty below 0")
    highest = max((*bias, *sampling.unwanted_ids), default=0)
    if highest >= vocab_size:
        raise MessageError(f"a bias for, or a ban on, token {highest}, which is outside the vocabulary of {vocab_size}")


# --------------------------------------------------------------------------------------------------- to gateways


def token_batches(events: Iterable[Event]) -> dict[int, engine.TokenBatch]:
    """Return one batch for each gateway (by incarnation), in which one sequence's consecutive tokens lie together."""
    batches: dict[int, engine.TokenBatch] = {}
    open_runs: dict[tuple[RequestKey, int], engine.SequenceTokens] = {}
    for event in events:
        gateway, handle = event.key
        batch = batches.setdefault(gateway, engine.TokenBatch())
        if isinstance(event, RequestEnd):
            batch.ends.append(_request_end(event))
            continue
        if isinstance(event, PromptTold):
            told = batch.sequences.add(handle=handle)
            for logprob in event.logprobs:
                assert isinstance(logprob, inference.TokenLogprob)
                told.prompt_logprobs.append(logprob)
            continue
        run = open_runs.get((event.key, event.index))
        if run is None:
            offset = event.offset if isinstance(event, NewToken) else event.output_tokens
            run = batch.sequences.add(handle=handle, index=event.index, offset=offset)
            open_runs[event.key, event.index] = run
        if isinstance(event, SequenceEnd):
            run.finish_reason = inference.FinishReason.ValueType(event.reason)
            run.score = event.score
            continue
        run.token_ids.append(event.token)
        if event.logprob is not None:
            assert isinstance(event.logprob, inference.TokenLogprob)
            run.logprobs.append(event.logprob)
    return batches


def _request_end(end: RequestEnd) -> engine.RequestEnd:
    return engine.RequestEnd(
        handle=end.key[1],
        error=engine.ErrorCode.ValueType(end.code),
        message=end.message,
        cached_tokens=end.cached_tokens,
        preemptions=end.preemptions,
        queue_seconds=end.queue_seconds,
    )


# -------------------------------------------------------------------------------------------- executors, both ways


def check_hello(hello: engine.ExecutorHello, *, swap: bool = False) -> None:
    """Refuse an executor that can't be worked with.

    Raises:
        MessageError: it speaks another protocol, has room for nothing, or has no host blocks where they are needed.
    """
    if hello.protocol != PROTOCOL:
        raise MessageError(f"the executor speaks protocol {hello.protocol}, the memory manager {PROTOCOL}: start one version")
    model = hello.model
    if not 1 <= model.block_size <= MAX_BLOCK_SIZE:
        raise MessageError(f"the executor has blocks of {model.block_size} tokens; 1 to {MAX_BLOCK_SIZE} can be used")
    if not 1 <= model.total_blocks <= MAX_BLOCKS:
        raise MessageError(f"the executor has {model.total_blocks} blocks; 1 to {MAX_BLOCKS} can be used")
    if hello.host_blocks > MAX_BLOCKS:
        raise MessageError(f"the executor has {hello.host_blocks} host blocks; at most {MAX_BLOCKS} can be used")
    if swap and not hello.host_blocks:
        raise MessageError("the executor has no host blocks, and the memory manager is to swap: start both with the same flags")
    capacity = model.total_blocks * model.block_size
    if not 2 <= model.context_length <= capacity:
        raise MessageError(f"a context of {model.context_length} tokens does not fit a pool of {capacity}")
    if min(hello.max_slots, hello.max_step_tokens, model.vocab_size) < 1:
        raise MessageError("the executor has room for no sequence")


def step_plan(plan: Plan) -> engine.StepPlan:
    """Return a plan as the executor reads it."""
    message = engine.StepPlan(step=plan.step, closes=plan.closes, freed_blocks=plan.memory.freed)
    for field, moves in (
        (message.copies, plan.memory.copies),
        (message.swap_outs, plan.memory.outs),
        (message.swap_ins, plan.memory.ins),
    ):
        for source, destination in moves:
            field.add(source=source, destination=destination)
    for slot, sampling, index in plan.opens:
        assert isinstance(sampling, engine.SamplingParams)
        message.opens.add(slot=slot, sampling=sampling, index=index)
    for chunk in plan.chunks:
        added = message.chunks.add(slot=chunk.slot, start=chunk.start, new_blocks=chunk.new_blocks)
        if chunk.tokens is not None:
            added.token_ids.extend(chunk.tokens)
        for logical, block in chunk.edits:
            added.edits.add(logical=logical, block=block)
    for slot, prompt_seen, outputs in plan.histories:
        message.histories.append(_history(slot, prompt_seen, outputs))
    for telling in plan.tellings:
        rows = message.prompt_rows.add(chunk=telling.chunk, first=telling.first, top_logprobs=telling.alternatives)
        rows.targets.extend(telling.targets)
    for sample in plan.samples:
        message.samples.add(chunk=sample.chunk, slot=sample.slot, position=sample.position, choices=sample.choices)
    return message


def _history(slot: int, prompt_seen: bytes, outputs: "array[int]") -> engine.History:
    counts = sorted(Counter(outputs).items())
    before = [0, *(token for token, _ in counts)]
    return engine.History(
        slot=slot,
        prompt_seen=prompt_seen,
        output_gaps=[token - previous for (token, _), previous in zip(counts, before, strict=False)],
        output_counts=[count for _, count in counts],
    )


def read_told(result: engine.StepResult, tellings: Sequence[PlannedTelling], vocab_size: int) -> list[tuple[object, ...]]:
    """Return what is told of prompts, in the order of the plan's tellings.

    Raises:
        MessageError: it is not what was asked for.
    """
    if len(result.prompts) != len(tellings):
        raise MessageError(f"{len(result.prompts)} prompts are told of where {len(tellings)} were to be")
    told: list[tuple[object, ...]] = []
    for telling, part in zip(tellings, result.prompts, strict=True):
        if [one.token_id for one in part.logprobs] != telling.targets.tolist():
            raise MessageError("other prompt tokens are told of than were asked for")
        if any(other.token_id >= vocab_size for one in part.logprobs for other in one.top):
            raise MessageError(f"an alternative is outside the vocabulary of {vocab_size}")
        told.append(tuple(part.logprobs))
    return told


def read_result(result: engine.StepResult, samples: Sequence[PlannedSample], vocab_size: int) -> Sequence[Sampled]:
    """Return what was sampled, in the order of the plan's samples.

    Raises:
        MessageError: the result is not one of a plan with these samples.
    """
    if len(result.token_ids) != len(samples):
        raise MessageError(f"{len(result.token_ids)} tokens for {len(samples)} samples")
    failed = set(result.failed)
    logprobs = {entry.sample: entry.logprob for entry in result.logprobs}
    told = {entry.sample: entry for entry in result.choices}
    for number, token in enumerate(result.token_ids):
        if token >= vocab_size and number not in failed:
            raise MessageError(f"token id {token} is outside the vocabulary of {vocab_size}")
    sampled: list[Sampled] = []
    for number, (token, sample) in enumerate(zip(result.token_ids, samples, strict=True)):
        choices: tuple[Choice, ...] = ()
        if sample.choices and number not in failed:
            choices = _choices(told.get(number, engine.SampleChoices()), sample, vocab_size)
        sampled.append(Sampled(token, number in failed, logprobs.get(number), choices))
    return sampled


def _choices(told: engine.SampleChoices, sample: PlannedSample, vocab_size: int) -> tuple[Choice, ...]:
    """Return what could follow a beam.

    Raises:
        MessageError: it is not what the sample asked for.
    """
    ids, logprobs = told.token_ids, told.logprobs
    if len(ids) != sample.choices or len(logprobs) != sample.choices:
        raise MessageError(f"{len(ids)} choices and {len(logprobs)} log-probabilities where {sample.choices} were asked for")
    if len(set(ids)) != len(ids) or max(ids) >= vocab_size:
        raise MessageError("a choice is named twice, or is outside the vocabulary")
    if any(math.isnan(logprob) or logprob == math.inf for logprob in logprobs):
        raise MessageError("a choice whose log-probability is no number")
    details: Iterable[object] = itertools.repeat(None)
    if sample.alternatives is not None:
        top = [inference.Alternative(token_id=token, logprob=logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        details = [
            inference.TokenLogprob(token_id=token, logprob=logprob, rank=rank, top=top[: sample.alternatives])
            for token, logprob, rank in zip(ids, logprobs, _ranks(logprobs), strict=True)
        ]
    return tuple(Choice(*one) for one in zip(ids, logprobs, details, strict=False))


def _ranks(logprobs: Sequence[float]) -> list[int]:
    """Return for each of the most likely tokens 1 + how many are strictly more likely."""
    return [1 + sum(other > logprob for other in logprobs) for logprob in logprobs]
