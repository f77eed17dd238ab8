"""Beam search through all three processes, against that of `transformers`: ids equal, scores within 1e-5, float32."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.beam_oracle import EXPECTED_BEAMS, NEW_TOKENS, PROMPTS, WIDTHS, Beam, search
from tests.e2e.calls import ask
from tests.e2e.system import Flag, Instance, System

pytestmark = pytest.mark.processes

SCORE_TOLERANCE = 1e-5
DEFAULT_EOS = 2  # of the default model

EXPECTED: list[dict[str, Any]] = json.loads(EXPECTED_BEAMS.read_text(encoding="utf-8"))["searches"]


def ask_beams(system: Instance, prompt: Sequence[int], width: int, tokens: int, **rest: Any) -> list[api.GenerateResponse]:
    """Return all hypotheses of a search, each as one message."""
    request = api.GenerateRequest(
        token_ids=api.TokenIds(ids=prompt), stopping=api.Stopping(max_tokens=tokens), n=width, beam_width=width, **rest
    )
    whole = [api.GenerateResponse() for _ in range(width)]
    for response in system.client.generate(request, 300):
        assert response.offset == len(whole[response.index].token_ids)
        whole[response.index].MergeFrom(response)
    return whole


def compare(found: Sequence[api.GenerateResponse], beams: Sequence[Beam], eos: int) -> None:
    assert [tuple(answer.token_ids) for answer in found] == [beam.ids for beam in beams]
    assert [answer.score for answer in found] == pytest.approx([beam.score for beam in beams], abs=SCORE_TOLERANCE, rel=1e-6)
    for answer in found:
        ended = answer.token_ids[-1] == eos
        assert answer.finish_reason == (api.FINISH_REASON_EOS if ended else api.FINISH_REASON_LENGTH)


def test_the_expected_searches_are_those_that_are_asked_for() -> None:
    assert len(EXPECTED) == PROMPTS * len(WIDTHS)
    assert all(len(row["beams"]) == row["width"] for row in EXPECTED)
    assert all(len(beam["ids"]) <= NEW_TOKENS for row in EXPECTED for beam in row["beams"])
    assert any(len(beam["ids"]) < NEW_TOKENS for row in EXPECTED for beam in row["beams"]), "no beam ends early"


@pytest.mark.model
def test_beams_of_the_default_model(ample: System) -> None:
    """The ten prompts with two beams and, all at once, three of them with each width."""
    chosen = [row for row in EXPECTED if row["width"] == 2] + EXPECTED[: 3 * len(WIDTHS)]
    with ThreadPoolExecutor(len(chosen)) as threads:
        answers = list(threads.map(lambda row: ask_beams(ample, row["prompt_ids"], row["width"], NEW_TOKENS), chosen))
    for row, found in zip(chosen, answers, strict=True):
        compare(found, [Beam(tuple(beam["ids"]), beam["score"]) for beam in row["beams"]], DEFAULT_EOS)


@pytest.fixture(scope="module")
def spread_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose every token depends on all before it."""
    from tests.e2e.tiny import save

    return save(tmp_path_factory.mktemp("spread"), spread=0.3)


@pytest.fixture(scope="module")
def tight(spread_model: Path) -> Iterator[System]:
    """Return a system in which three searches do not fit together, with NaN in all that is unwritten."""
    flags: dict[str, Flag] = {
        "model": spread_model,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 60,
        "poison": True,
    }
    with System(flags, threads=1) as system:
        yield system


def test_searches_that_do_not_fit_together_are_set_aside_and_find_the_same(tight: System, spread_model: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(spread_model, dtype=torch.float32).eval()
    cases = [(tuple(range(first, first + 11)), width, penalty) for first, width, penalty in
             ((1, 2, 1.0), (40, 4, 0.0), (70, 6, 2.0), (90, 3, -1.0), (120, 5, 1.0))]  # fmt: skip
    before = tight.admin.pool().counters.preemptions
    with ThreadPoolExecutor(len(cases) + 1) as threads:
        asked = [threads.submit(ask_beams, tight, prompt, width, 30, length_penalty=penalty) for prompt, width, penalty in cases]
        other = threads.submit(ask, tight.client, api.GenerateRequest(text="beside", stopping=api.Stopping(max_tokens=30)))
        for (prompt, width, penalty), answer in zip(cases, asked, strict=True):
            compare(answer.result(), search(model, prompt, width, 30, penalty), model.config.eos_token_id)
        assert other.result().ids
    assert tight.admin.pool().counters.preemptions > before
    assert list(tight.admin.verify(with_executor=True).faults) == []
    tight.settled()


def test_what_is_told_of_a_beams_tokens_adds_up_to_its_score(tight: System) -> None:
    found = ask_beams(tight, range(1, 12), 3, 8, output=api.Output(logprobs=5))
    for answer in found:
        total = sum(token.logprob for token in answer.logprobs)
        assert answer.score == pytest.approx(total / len(answer.token_ids), abs=1e-5)
        for token_id, told in zip(answer.token_ids, answer.logprobs, strict=True):
            assert told.token_id == token_id
            assert len(told.top) == 5
            assert told.top[0].logprob >= told.logprob
            assert (told.rank == 1) == (told.top[0].logprob == told.logprob)
    tight.settled()
