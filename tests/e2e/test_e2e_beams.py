"""Beam search through all three processes, against that of `transformers`: ids equal, scores within 1e-5, float32."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.beam_oracle import NEW_TOKENS, PROMPTS, WIDTHS, search
from tests.e2e.beams import DEFAULT_EOS, ask_beams, compare, read_expected_searches
from tests.e2e.calls import ask
from tests.e2e.system import Flag, System

pytestmark = pytest.mark.processes


def test_the_expected_searches_are_those_that_are_asked_for() -> None:
    expected = read_expected_searches()
    assert len(expected) == PROMPTS * len(WIDTHS)
    assert all(len(row.beams) == row.width for row in expected)
    assert all(len(beam.ids) <= NEW_TOKENS for row in expected for beam in row.beams)
    assert any(len(beam.ids) < NEW_TOKENS for row in expected for beam in row.beams), "no beam ends early"


@pytest.mark.model
def test_beams_of_the_default_model(ample: System) -> None:
    """The ten prompts with two beams and, all at once, three of them with each width."""
    expected = read_expected_searches()
    chosen = [row for row in expected if row.width == 2] + expected[: 3 * len(WIDTHS)]
    with ThreadPoolExecutor(len(chosen)) as threads:
        answers = list(threads.map(lambda row: ask_beams(ample, row.prompt_ids, row.width, NEW_TOKENS), chosen))
    for row, found in zip(chosen, answers, strict=True):
        compare(found, row.beams, DEFAULT_EOS)


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
