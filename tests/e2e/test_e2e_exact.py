"""Six of the exactness prompts against `transformers`; `make exact` runs all of them in all ways."""

import pytest

from tests.e2e import rounds
from tests.e2e.corpus import Expected, read_expected
from tests.e2e.system import System

processes = pytest.mark.processes
model = pytest.mark.model


def test_the_expected_answers_are_beyond_doubt() -> None:
    prompts = read_expected()
    lengths = {len(prompt.prompt_ids) for prompt in prompts}
    assert len(prompts) == len({prompt.name for prompt in prompts}) == 24
    assert {1, 15, 16, 17, 48, 112, 700} <= lengths
    assert all(len(prompt.output_ids) == 64 for prompt in prompts)
    assert min(prompt.smallest_gap for prompt in prompts) > 1e-3
    assert sum(prompt.chat is not None for prompt in prompts) >= 3


@processes
@model
def test_blocks_of_16_one_at_a_time(ample: System, chosen: list[Expected]) -> None:
    """In the form that each was written in: those that are text or chat."""
    written = [prompt for prompt in chosen if prompt.text is not None or prompt.chat is not None]
    assert len(written) >= 4
    rounds.run(ample, written, "alone", salt="exact-alone")


@processes
@model
def test_blocks_of_16_all_at_once_cold_and_warm(ample: System, chosen: list[Expected]) -> None:
    cold = rounds.run(ample, chosen, "together", salt="exact-together")
    warm = rounds.run(ample, chosen, "warm", salt="exact-together")
    # Where prompts begin alike, the first of them may be done before the last is admitted.
    assert cold.cached_tokens < warm.cached_tokens
    # All but the last token of each prompt, which is computed in any case: the tails of blocks are shared too.
    assert warm.cached_tokens == sum(len(prompt.prompt_ids) - 1 for prompt in chosen)
    assert cold.preemptions == warm.preemptions == 0


@processes
@model
def test_blocks_of_7_in_the_smallest_pool_with_nan_in_all_that_is_unwritten(small: System, chosen: list[Expected]) -> None:
    together = rounds.run(small, chosen, "together", salt="exact-together")
    warm = rounds.run(small, chosen, "warm", salt="exact-together")
    assert together.preemptions > 0
    assert warm.preemptions > 0
