"""Stop strings, and the text of a stream: what is sent, and what of the stop string is not."""

import itertools

import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.calls import Answer, ask
from tests.e2e.system import System

pytestmark = [pytest.mark.processes, pytest.mark.model]

PROMPT = "Count from one to twenty: one, two, three, four,"
TOKENS = 20


def answer(system: System, **stopping: object) -> Answer:
    wish = api.Stopping(max_tokens=TOKENS, ignore_eos=True, **stopping)  # type: ignore[arg-type]
    return ask(system.client, api.GenerateRequest(text=PROMPT, sampling=api.Sampling(temperature=0), stopping=wish))


@pytest.fixture(scope="module")
def whole(_ample: System) -> Answer:
    """Return the answer that nothing stops; its text must be that of its ids at once."""
    whole = answer(_ample)
    assert len(whole.ids) == TOKENS
    assert whole.text == _ample.client.detokenize(whole.ids)
    return whole


@pytest.mark.parametrize("include", [False, True])
def test_nothing_of_a_stop_string_is_sent_or_all_of_it(ample: System, whole: Answer, include: bool) -> None:
    """Stops that are three tokens, that begin and end inside tokens, and that begin with the first character."""
    ends = list(itertools.accumulate(len(ample.client.detokenize([token])) for token in whole.ids))
    assert ends[-1] == len(whole.text)
    stops = [whole.text[ends[at - 1] + shift : ends[at + 2] + shift] for at in (1, 6) for shift in (0, 1)]
    for stop in [*stops, whole.text[:5]]:
        begin = whole.text.index(stop)
        stopped = answer(ample, stop=["no such thing", stop], include_stop=include)
        assert stopped.finish == api.FINISH_REASON_STOP
        assert stopped.stop_match == stop
        assert stopped.text == whole.text[: begin + len(stop) * include]
        assert stopped.ids == whole.ids[: len(stopped.ids)]
        assert ends[len(stopped.ids) - 1] >= begin + len(stop) > (ends[len(stopped.ids) - 2] if len(stopped.ids) > 1 else 0)


def test_a_stop_string_that_only_begins_comes_with_the_end(ample: System, whole: Answer) -> None:
    begun = answer(ample, stop=[whole.text[-6:] + "but no more"])
    assert (begun.text, begun.ids, begun.finish) == (whole.text, whole.ids, api.FINISH_REASON_LENGTH)
