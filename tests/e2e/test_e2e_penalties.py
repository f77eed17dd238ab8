"""Penalties, bias, ends that may not come yet and what is told of prompts, through real processes, against transformers.

The model is tiny, but each of its tokens depends on all before it; prompts are computed in chunks, and all that is unwritten is
NaN. What is expected comes from transformers' logits, changed one token after the other in plain Python.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from executor.sampler import Draw, Sampling
from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, ask, ask_all, ask_samples, from_ids
from tests.e2e.system import System
from tests.e2e.tiny import save
from tests.executor.sampler_oracle import changed, sums

pytestmark = pytest.mark.processes

BLOCK = 16
BLOCKS = 24
END = 256

#: Further apart than this, rounding changes no token.
MIN_GAP = 1e-3

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), spread=0.3)


class Reference:
    """What transformers' logits come to; None where two tokens are as good as equal."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return [tokens, vocabulary], float64."""
        found: torch.Tensor = self._model(torch.tensor([list(ids)])).logits[0].double()
        return found

    def answer(self, prompt: Sequence[int], count: int, drawn: Draw | None = None, **changes: Any) -> list[int] | None:
        """Return the tokens that come: the likeliest, or those of a draw."""
        outputs: list[int] = []
        while len(outputs) < count:
            row = np.array(changed(self.logits([*prompt, *outputs])[-1].tolist(), prompt, outputs, **changes))
            if drawn is not None:
                row = sums(row, Draw(drawn.sampling, drawn.index, len(outputs)))
            second, first = np.sort(row)[-2:]
            if first - second < MIN_GAP:
                return None
            outputs.append(int(row.argmax()))
            if outputs[-1] in changes.get("unwanted", ()):
                break
        return outputs

    def pose(self, length: int, count: int, drawn: Draw | None = None, **changes: Any) -> tuple[list[int], list[int]]:
        """Return a prompt that is beyond doubt, and its answer."""
        for seed in range(1, 50):
            prompt = [(seed * 37 + length * 11 + at * at) % 61 for at in range(length)]
            answer = self.answer(prompt, count, drawn, **changes)
            if answer is not None:
                return prompt, answer
        raise AssertionError("no prompt is beyond doubt")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def _system(model: Path) -> Iterator[System]:
    sizes: dict[str, Any] = {"block_size": BLOCK, "num_blocks": BLOCKS, "max_running": 32, "max_step_tokens": 48}
    with System({"model": model, "device": "cpu", "poison": True, **sizes}, threads=1) as system:
        yield system


@pytest.fixture
def system(_system: System) -> Iterator[System]:
    yield _system
    _system.settled()


def request(
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    unwanted: Collection[int] = (),
    **rest: Any,
) -> api.GenerateRequest:
    sampling = api.Sampling(
        temperature=temperature,
        seed=seed,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias or {},
    )
    made = from_ids(prompt, count, sampling=sampling, **rest)
    made.stopping.min_tokens = min_tokens
    made.stopping.stop_token_ids.extend(unwanted)
    return made


EACH: dict[str, dict[str, Any]] = {
    "repetition": {"repetition": 1.3},
    "repetition below 1": {"repetition": 0.8},
    "presence": {"presence": 1.5},
    "frequency": {"frequency": 0.7},
    "negative ones": {"presence": -0.5, "frequency": -0.25},
    "bias": {"bias": {5: 100.0, 7: -100.0, 0: 2.5}},
    "all": {"repetition": 1.2, "presence": 0.5, "frequency": 0.5, "bias": {3: 2.0, 9: -2.0, 17: 4.0}},
    "ends": {"min_tokens": 20, "unwanted": (1, 2, 3, *range(50, 150))},
}


@pytest.mark.parametrize("name", EACH)
def test_each_one_cold_and_with_a_cached_prompt(system: System, reference: Reference, name: str) -> None:
    prompt, expected = reference.pose(5 * BLOCK, 30, **EACH[name])
    plain = reference.answer(prompt, 30)
    assert plain != expected, "it changes nothing, and proves nothing"
    cold, warm = (ask(system.client, request(prompt, 30, cache_salt=name, **EACH[name])) for _ in range(2))
    assert cold.ids == warm.ids == expected
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 5 * BLOCK - 1)


def test_a_repetition_penalty_is_that_of_transformers(system: System, reference: Reference) -> None:
    prompt, expected = reference.pose(40, 25, repetition=1.3)
    given = torch.tensor([prompt])
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=25, repetition_penalty=1.3)
    theirs = reference._model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    assert theirs[0, 40:].tolist() == expected
    assert ask(system.client, request(prompt, 25, repetition=1.3)).ids == expected


def test_log_probabilities_are_the_model_s_own_whatever_the_penalties(system: System, reference: Reference) -> None:
    prompt, expected = reference.pose(20, 12, **EACH["all"])
    answer = ask(system.client, request(prompt, 12, output=api.Output(logprobs=3), **EACH["all"]))
    assert answer.ids == expected
    rows = reference.logits([*prompt, *expected]).log_softmax(dim=-1)[len(prompt) - 1 : -1]
    check_told(answer.logprobs, rows, expected, 3)


def check_told(told: Sequence[api.TokenLogprob], rows: torch.Tensor, tokens: Sequence[int], top: int) -> None:
    """Insist that what is told of tokens is what `rows` [tokens, vocabulary] of log-probabilities say."""
    assert [one.token_id for one in told] == list(tokens)
    for one, row in zip(told, rows, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=TOLERANCE)
        higher, near = (row > row[one.token_id] + TOLERANCE).sum(), (row >= row[one.token_id] - TOLERANCE).sum()
        assert int(higher) + 1 <= one.rank <= int(near)
        assert [alternative.logprob for alternative in one.top] == pytest.approx(row.topk(top).values.tolist(), abs=TOLERANCE)
        for alternative in one.top:
            assert alternative.logprob == pytest.approx(float(row[alternative.token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, BLOCK, 47, 48, 49, 200])
@pytest.mark.parametrize("top", [None, 0, 2])
def test_what_is_told_of_a_prompt(system: System, reference: Reference, length: int, top: int | None) -> None:
    prompt, expected = reference.pose(length, 2)
    output = api.Output(prompt_logprobs=True) if top is None else api.Output(prompt_logprobs=True, logprobs=top)
    before = system.admin.pool().counters.prefill_tokens
    assert ask(system.client, request(prompt, 2, cache_salt=f"told {top}")).ids == expected  # it is cached now
    answer = ask(system.client, request(prompt, 2, cache_salt=f"told {top}", output=output))
    assert answer.ids == expected
    assert len(answer.logprobs) == (0 if top is None else 2)
    check_told(answer.prompt_logprobs, reference.logits(prompt).log_softmax(dim=-1)[:-1], prompt[1:], top or 0)
    assert answer.usage.cached_tokens == 0
    assert system.admin.pool().counters.prefill_tokens - before == 2 * length
    again = ask(system.client, request(prompt, 2, cache_salt=f"told {top}"))
    assert again.ids == expected
    if 2 * length < BLOCK * BLOCKS // 2:  # else computing it whole took some of the blocks that were cached
        assert again.usage.cached_tokens == (length - 1 if length >= BLOCK else 0)


def test_a_prompt_s_echo_and_what_is_told_of_it_come_once_for_several_samples(system: System, reference: Reference) -> None:
    prompt, _ = reference.pose(60, 1)
    asked = request(prompt, 4, temperature=1.0, seed=3, n=3, output=api.Output(prompt_logprobs=True, echo=True))
    told: dict[int, list[api.TokenLogprob]] = {}
    for response in system.client.generate(asked, 60):
        assert not response.prompt_logprobs or (response.index, response.offset) == (0, 0)
        told.setdefault(response.index, []).extend(response.prompt_logprobs)
    check_told(told[0], reference.logits(prompt).log_softmax(dim=-1)[:-1], prompt[1:], 0)
    assert not told[1]
    assert not told[2]


def test_beams_are_told_of_their_prompt_and_do_not_end_too_early(system: System, reference: Reference) -> None:
    prompt, plain = reference.pose(11, 6)
    stop = plain[0]
    wish = api.Stopping(max_tokens=6, min_tokens=5, stop_token_ids=[stop])
    asked = api.GenerateRequest(
        token_ids=api.TokenIds(ids=prompt), beam_width=3, stopping=wish, output=api.Output(prompt_logprobs=True)
    )
    answer = ask(system.client, asked)
    given = torch.tensor([prompt])
    config = transformers.GenerationConfig(num_beams=3, max_new_tokens=6, min_new_tokens=5, do_sample=False, pad_token_id=0)
    config.eos_token_id = [END, stop]
    theirs = reference._model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    assert answer.ids == theirs[0, len(prompt) :].tolist()
    assert not {END, stop} & {*answer.ids[:5]}
    check_told(answer.prompt_logprobs, reference.logits(prompt).log_softmax(dim=-1)[:-1], prompt[1:], 0)


def test_an_end_that_may_not_come_yet(system: System, reference: Reference) -> None:
    prompt, bias = [5, 4, 3, 2], {END: 100.0}

    def answer(**stopping: Any) -> Answer:
        asked = request(prompt, 12, bias=bias)
        asked.stopping.CopyFrom(api.Stopping(max_tokens=12, **stopping))
        return ask(system.client, asked)

    assert answer().ids == [END]
    for least in (1, 4, 11, 12):
        expected = reference.answer(prompt, 12, bias=bias, min_tokens=least, unwanted=(END,))
        assert expected is not None
        assert expected[least:] == [END][: 12 - least]
        assert answer(min_tokens=least).ids == expected
    assert answer(min_tokens=4, ignore_eos=True).ids[0] == END  # it ends nothing, so it may come


def test_a_stop_string_that_comes_too_early_does_not_count(system: System) -> None:
    (letter,) = system.client.tokenize("a")
    prompt, bias = [5, 4, 3, 2], {letter: 100.0}

    def answer(least: int, stop: str) -> Answer:
        asked = request(prompt, 12, bias=bias, min_tokens=least)
        asked.stopping.stop.append(stop)
        return ask(system.client, asked)

    first = answer(0, "aa")
    assert (first.finish, first.ids, first.text) == (api.FINISH_REASON_STOP, [letter] * 2, "")
    for least in (2, 3, 7):
        late = answer(least, "aa")
        assert (late.finish, late.ids, late.text) == (api.FINISH_REASON_STOP, [letter] * (least + 1), "a" * (least - 1))


def drawn(seed: int, index: int, temperature: float = 1.0) -> Draw:
    return Draw(Sampling(temperature, 1.0, 0, 0.0, seed, False, 0), index, 0)


def test_samples_of_one_prompt_count_their_own_tokens(system: System, reference: Reference) -> None:
    """They share the prompt's blocks, and copy its last one when they part."""
    prompt, changes = [(at * at * 5) % 61 for at in range(37)], EACH["all"]
    seed, expected = next(
        (seed, answers)
        for seed in range(50)
        if None not in (answers := [reference.answer(prompt, 16, drawn(seed, index), **changes) for index in range(3)])
    )
    assert len({tuple(answer or ()) for answer in expected}) == 3
    for salt in ("cold", "cold"):
        found = ask_samples(system.client, request(prompt, 16, temperature=1.0, seed=seed, n=3, cache_salt=salt, **changes))
        assert [answer.ids for answer in found] == expected


def test_a_preempted_request_goes_on_with_the_same_tokens(system: System, reference: Reference) -> None:
    """Eight requests need more than there is; who is set aside is computed again, and knows what it has had."""
    before = system.admin.pool().counters.preemptions
    changes = EACH["all"]
    posed = [reference.pose(20 + 3 * number, 60, **changes) for number in range(8)]
    output = api.Output(prompt_logprobs=True)
    answers = ask_all(system.client, [request(prompt, 60, cache_salt="crowd", output=output, **changes) for prompt, _ in posed])
    assert [answer.ids for answer in answers] == [expected for _, expected in posed]
    assert system.admin.pool().counters.preemptions > before
    assert any(answer.usage.preemptions for answer in answers)
    for answer, (prompt, _) in zip(answers, posed, strict=True):
        check_told(answer.prompt_logprobs, reference.logits(prompt).log_softmax(dim=-1)[:-1], prompt[1:], 0)


def test_a_seed_with_penalties_draws_the_same_in_any_batch(system: System) -> None:
    prompt, changes = [9, 8, 7, 6, 5], EACH["all"]
    mine = request(prompt, 12, temperature=1.0, seed=77, **changes)
    alone = ask(system.client, mine)
    assert alone.ids != ask(system.client, request(prompt, 12, temperature=1.0, seed=77)).ids
    for others in (1, 5, 31):
        beside = [
            request([number, 1], 12, temperature=1.0, seed=number, **EACH[name])
            for number, name in zip(range(others), list(EACH) * 4, strict=False)
        ]
        assert ask_all(system.client, [*beside, mine])[-1].ids == alone.ids
