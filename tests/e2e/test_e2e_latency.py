"""A running stream while long prompts are computed: it gets a token with every step, and no step is held up."""

import itertools
import time

import pytest

from kilburn.v1.engine_pb2 import StepPlan, StepResult
from tests.e2e.calls import Running, ask_all, greedy
from tests.e2e.place import wait_until
from tests.e2e.tapped import Tapped

pytestmark = pytest.mark.processes

PROMPTS = 8
PROMPT_TOKENS = 1024

#: For all of them, on a slow and busy machine.
PREFILL_SECONDS = 240

#: Rows of a step that takes milliseconds, whatever computes it: planning the next one takes well under one.
LONG_STEP = 128

#: The longest gap between two tokens of the stream, in steps.
LONGEST_GAP = 1.5


def test_eight_long_prompts_hold_a_running_stream_up_by_no_more_than_a_step(tapped: Tapped) -> None:
    client = tapped.system.client
    stream = Running(client, greedy([40, 41, 42], 1500, request_id="stream"), PREFILL_SECONDS)
    wait_until(lambda: stream.tokens >= 3, 60, "three tokens of the stream")
    slot = tapped.slot_of("stream")
    begun = time.monotonic()
    prompts = [[(seed + number * number) % 251 for number in range(PROMPT_TOKENS)] for seed in range(PROMPTS)]
    answers = ask_all(client, [greedy(prompt, 2, cache_salt="cold") for prompt in prompts], PREFILL_SECONDS)
    ended = time.monotonic()
    arrivals = [at for at in stream.answer.arrivals if begun <= at <= ended]
    stream.call.cancel()
    stream.wait()

    assert all(len(answer.ids) == 2 for answer in answers)
    plans = [plan for at, plan in tapped.executor.seen(StepPlan, begun) if at < ended]
    prefills = [plan for plan in plans if sum(len(chunk.token_ids) for chunk in plan.chunks) > 1]
    assert sum(len(chunk.token_ids) for plan in prefills for chunk in plan.chunks) >= PROMPTS * PROMPT_TOKENS
    assert all(any(chunk.slot == slot for chunk in plan.chunks) for plan in plans), "a step without the stream"
    assert len(arrivals) >= len(prefills) - 2

    results = [at for at, _ in tapped.executor.seen(StepResult, begun) if at < ended]
    longest_step = max(later - earlier for earlier, later in itertools.pairwise(results))
    longest_gap = max(later - earlier for earlier, later in itertools.pairwise(arrivals))
    assert longest_gap <= LONGEST_GAP * longest_step


def test_the_next_plan_is_there_before_the_result_of_a_step_that_takes_longer_than_planning(tapped: Tapped) -> None:
    begun = time.monotonic()
    prompts = [[(7 + seed + number * number) % 251 for number in range(PROMPT_TOKENS)] for seed in range(PROMPTS)]
    ask_all(tapped.system.client, [greedy(prompt, 2, cache_salt="cold") for prompt in prompts], PREFILL_SECONDS)
    plans = {plan.step: (at, plan) for at, plan in tapped.executor.seen(StepPlan, begun)}
    resulted = {result.step: at for at, result in tapped.executor.seen(StepResult, begun)}
    long = [step for step, (_, plan) in plans.items() if sum(len(chunk.token_ids) for chunk in plan.chunks) >= LONG_STEP]
    followed = [step for step in long if step in resulted and step + 1 in plans]
    early = [step for step in followed if plans[step + 1][0] < resulted[step]]
    assert len(followed) >= PROMPTS * PROMPT_TOKENS // 1024
    assert len(early) >= 0.9 * len(followed)
