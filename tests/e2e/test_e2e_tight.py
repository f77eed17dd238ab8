"""A pool of sixteen blocks, for which requests compete: every answer is that of transformers, whatever happens around it.

The model's attention matters, so that a wrong block changes tokens; all that is unwritten is NaN. Its folder and the runtime
folder have names that need care.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from kilburn.client import Client
from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, Running, ask, ask_all, greedy, seeded
from tests.e2e.place import wait_until
from tests.e2e.system import Flag, System
from tests.e2e.tiny import save

pytestmark = pytest.mark.processes

BLOCK = 16
BLOCKS = 16
POOL = BLOCK * BLOCKS

#: As in oracle.py: further apart than this, rounding changes no token.
MIN_GAP = 1e-3


class Reference:
    """What transformers answers, to prompts at which no two tokens are as good as equal."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, output_logits=True, return_dict_in_generate=True
        )

    def answer(self, prompt: Sequence[int], count: int) -> list[int] | None:
        """Return the greedy answer, through ends of sequence; None where it is in doubt."""
        given = torch.tensor([list(prompt)])
        generated = self._model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count)
        best = torch.cat(generated.logits).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) < MIN_GAP:
            return None
        return [int(token) for token in generated.sequences[0, len(prompt) :]]

    def pose(self, length: int, count: int, prefix: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Return a prompt of `length` tokens that begins with `prefix`, and its answer; other ones for other lengths."""
        for seed in range(1, 50):
            prompt = [*prefix, *((seed * 37 + length * 11 + at * at) % 251 for at in range(length - len(prefix)))]
            answer = self.answer(prompt, count)
            if answer is not None:
                return prompt, answer
        raise AssertionError("no prompt is beyond doubt")

    @torch.inference_mode()
    def prompt_for(self, token: int) -> list[int]:
        """Return a prompt that is answered with this token first."""
        prompts = torch.randint(0, 250, (4000, 7), generator=torch.Generator().manual_seed(1))
        values, tokens = self._model(prompts, logits_to_keep=1).logits[:, 0].topk(2)
        is_clear = (tokens[:, 0] == token) & (values[:, 0] - values[:, 1] > MIN_GAP)
        return [int(number) for number in prompts[is_clear.nonzero()[0, 0]]]


#: Ends of sequence, by who names them: the tokenizer's is the last of its tokens.
IN_CONFIG, IN_GENERATION_CONFIG, IN_TOKENIZER = 30, (31, 32), 256
ENDS = (IN_CONFIG, *IN_GENERATION_CONFIG, IN_TOKENIZER)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("models") / f"50 % größer, {'lang' * 30}" / "模型", spread=0.3)
    for name, ends in ("config.json", IN_CONFIG), ("generation_config.json", list(IN_GENERATION_CONFIG)):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def _tight(model: Path) -> Iterator[System]:
    sizes: dict[str, Flag] = {"block_size": BLOCK, "num_blocks": BLOCKS, "max_running": 8}
    flags: dict[str, Flag] = {"model": model, "device": "cpu", "poison": True, **sizes}
    with System(flags, threads=1, folder="100 % %(here)s") as system:
        yield system


@pytest.fixture
def tight(_tight: System) -> Iterator[System]:
    yield _tight
    _tight.settled()


def logged(ids: Sequence[int], count: int, **rest: Any) -> api.GenerateRequest:
    return greedy(ids, count, output=api.Output(logprobs=2), **rest)


def test_a_prompt_whose_blocks_were_all_given_away_is_answered_as_before(tight: System, reference: Reference) -> None:
    prompt, expected = reference.pose(4 * BLOCK, 12)
    first = ask(tight.client, greedy(prompt, 12))
    for length in (200, 201, 202):
        other, answer = reference.pose(length, 8)
        assert ask(tight.client, greedy(other, 8)).ids == answer
    again = ask(tight.client, greedy(prompt, 12))
    assert first.ids == again.ids == expected
    assert first.usage.cached_tokens == again.usage.cached_tokens == 0
    longer, expected = reference.pose(5 * BLOCK, 12, prefix=prompt)
    warm = ask(tight.client, greedy(longer, 12))
    assert warm.ids == expected
    assert warm.usage.cached_tokens >= 4 * BLOCK


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_prompt_that_ends_at_the_edge_of_a_block_is_answered_twice(tight: System, reference: Reference, length: int) -> None:
    prompt, expected = reference.pose(length, 6)
    cold, warm = (ask(tight.client, logged(prompt, 6, cache_salt=f"twice-{length}")) for _ in range(2))
    assert cold.ids == warm.ids == expected
    assert [one.logprob for one in warm.logprobs] == pytest.approx([one.logprob for one in cold.logprobs], abs=1e-4)
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == (length - 1 if length >= BLOCK else 0)


def test_requests_that_share_one_block_and_part(tight: System, reference: Reference) -> None:
    prefix, answer = reference.pose(BLOCK, 1)
    sharing = [reference.pose(BLOCK + more, 10, prefix) for more in (1, 2, 9, 30)]
    alone = [reference.pose(length, 10) for length in (5, 21, 40)]
    for turn in range(10):
        salt = f"one-block-{turn}"
        assert ask(tight.client, greedy(prefix, 1, cache_salt=salt)).ids == answer
        answers = ask_all(tight.client, [greedy(prompt, 10, cache_salt=salt) for prompt, _ in sharing + alone])
        assert [one.ids for one in answers] == [expected for _, expected in sharing + alone]
        assert all(one.usage.cached_tokens >= BLOCK - 1 for one in answers[: len(sharing)])


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_neighbours_of_all_lengths_come_and_go(tight: System, reference: Reference, count: int) -> None:
    before = tight.admin.pool().counters
    lengths = islice(cycle([3, 120, 17, 64, 1, 90, 33]), 2 * count)
    posed = [reference.pose(length, 20 + 9 * (number % 5)) for number, length in enumerate(lengths)]
    for first in (0, count):
        requests = [greedy(prompt, len(answer), cache_salt=f"all-{count}") for prompt, answer in posed[first : first + count]]
        answers = ask_all(tight.client, requests)
        assert [one.ids for one in answers] == [answer for _, answer in posed[first : first + count]]
        assert [one.usage.completion_tokens for one in answers] == [len(one.ids) for one in answers]
    assert count < 7 or tight.admin.pool().counters.preemptions > before.preemptions


def test_prompts_that_share_nothing_hit_nothing_also_where_they_are_preempted(tight: System) -> None:
    before = tight.admin.pool().counters
    prompts = [[number, *((number * 7 + at * at * 3) % 251 for at in range(number - 160))] for number in range(200, 206)]
    answers = ask_all(tight.client, [greedy(prompt, 60, cache_salt="unique") for prompt in prompts])
    after = tight.admin.pool().counters
    assert after.preemptions > before.preemptions
    assert after.recomputed_tokens > before.recomputed_tokens
    assert after.prefix_query_tokens - before.prefix_query_tokens == sum(map(len, prompts))
    assert after.prefix_hit_tokens == before.prefix_hit_tokens
    assert all(answer.usage.cached_tokens == 0 for answer in answers)


def test_who_goes_on_is_not_disturbed_by_the_end_of_who_it_shared_with(tight: System, reference: Reference) -> None:
    prefix, _ = reference.pose(3 * BLOCK, 1)
    short, survivor, third = (reference.pose(3 * BLOCK + more, count, prefix) for more, count in ((3, 4), (5, 180), (8, 20)))
    goes_on = Running(tight.client, greedy(survivor[0], 180, priority=-1))
    wait_until(lambda: goes_on.tokens > 0, 60, "its first token")
    assert ask(tight.client, greedy(short[0], 4)).ids == short[1]
    load = [reference.pose(length, 4) for length in (60, 61, 62)]
    answers = ask_all(tight.client, [greedy(prompt, 4) for prompt, _ in load])
    assert [one.ids for one in answers] == [answer for _, answer in load]
    assert ask(tight.client, greedy(third[0], 20)).ids == third[1]
    assert goes_on.wait().ids == survivor[1]
    assert goes_on.answer.usage.preemptions == 0
    assert ask(tight.client, greedy(third[0], 20)).ids == third[1]


def test_a_prompt_that_fills_the_pool_ends_with_it(tight: System, reference: Reference) -> None:
    prompt, expected = reference.pose(POOL - 2, 2)
    answer = ask(tight.client, greedy(prompt, 2 * BLOCK))
    assert (answer.ids, answer.finish) == (expected, api.FINISH_REASON_CONTEXT)
    for ids in ([*prompt, 1, 2], [*prompt, 1, 2, 3]):
        refused = ask(tight.client, greedy(ids, 2 * BLOCK))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt-too-long")
    again = ask(tight.client, greedy(prompt, 2 * BLOCK))
    assert (again.ids, again.finish) == (expected, api.FINISH_REASON_CONTEXT)


def test_cancels_in_the_queue_disturb_no_stream(tight: System, reference: Reference) -> None:
    posed = [reference.pose(20 + number, 90) for number in range(2)]
    streams = [Running(tight.client, greedy(prompt, 90)) for prompt, _ in posed]
    wait_until(lambda: all(stream.tokens > 0 for stream in streams), 60, "their first tokens")
    cancelled = 0
    while cancelled < 50 and not all(stream.done for stream in streams):
        queued = Running(tight.client, greedy([cancelled] * (POOL - 10), 5))
        queued.call.cancel()
        assert queued.wait().code is grpc.StatusCode.CANCELLED
        cancelled += 1
    for stream, (_, expected) in zip(streams, posed, strict=True):
        answer = stream.wait()
        assert (answer.code, answer.ids) == (grpc.StatusCode.OK, expected)
        assert answer.finish == api.FINISH_REASON_LENGTH
    assert cancelled >= 5


def test_a_seed_is_its_requests_own_whoever_is_beside_it(tight: System) -> None:
    prompt = [9, 8, 7]

    def seeds(*chosen: int | None) -> list[list[int]]:
        requests = [seeded(prompt, 16, 0 if seed is None else seed) for seed in chosen]
        for request, seed in zip(requests, chosen, strict=True):
            if seed is None:
                request.sampling.ClearField("seed")
        answers: list[Answer] = ask_all(tight.client, requests)
        return [answer.ids for answer in answers]

    (alone,) = seeds(42)
    unseeded = []
    for _ in range(5):
        with_seed, without = seeds(42, None)
        assert with_seed == alone
        unseeded.append(tuple(without))
    assert len(set(unseeded)) == 5
    assert seeds(42, 42) == [alone, alone]
    first, other = seeds(42, 7)
    assert first == alone != other
    assert seeds(42, *range(100, 106))[0] == alone


def test_a_prefix_is_found_by_its_own_tenant_and_salt_alone(tight: System, reference: Reference) -> None:
    prompt, expected = reference.pose(2 * BLOCK, 4)
    domains = [("", "mine"), ("mine", ""), ("mine", "mine"), ("", "other"), ("minemine", "")]
    address = str(tight.gateway_address)
    for tenant, salt in domains:  # each with what the others have left in the cache
        with Client(address, tenant) as client:
            cold, warm = (ask(client, greedy(prompt, 4, cache_salt=salt)) for _ in range(2))
        assert cold.ids == warm.ids == expected
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 2 * BLOCK - 1)


@pytest.mark.parametrize("end", ENDS)
def test_each_end_of_sequence_ends_a_request_unless_it_is_ignored(tight: System, reference: Reference, end: int) -> None:
    prompt = api.TokenIds(ids=reference.prompt_for(end))
    greedily = api.Sampling(temperature=0)

    def answer(**stopping: Any) -> Answer:
        wish = api.Stopping(max_tokens=12, **stopping)
        return ask(tight.client, api.GenerateRequest(token_ids=prompt, sampling=greedily, stopping=wish))

    ended = answer()
    assert (ended.ids, ended.finish) == ([end], api.FINISH_REASON_EOS)
    ignored = answer(ignore_eos=True)
    assert (len(ignored.ids), ignored.ids[0], ignored.finish) == (12, end, api.FINISH_REASON_LENGTH)
    stop = next(token for token in ignored.ids if token not in ENDS)
    stopped = answer(ignore_eos=True, stop_token_ids=[stop])
    assert stopped.ids == ignored.ids[: ignored.ids.index(stop) + 1]
    assert stopped.finish == api.FINISH_REASON_EOS
