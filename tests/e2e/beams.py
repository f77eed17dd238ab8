"""Beam searches asked of a running system, and compared with those that `beam_oracle` wrote down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pytest

from kilburn.v1 import inference_pb2 as api
from tests.e2e.beam_oracle import EXPECTED_BEAMS, Beam, Search
from tests.e2e.system import Instance

SCORE_TOLERANCE: Final = 1e-5
DEFAULT_EOS: Final = 2  # of the default model


def read_expected_searches() -> list[Search]:
    """Return the searches of `transformers`."""
    rows = json.loads(EXPECTED_BEAMS.read_text(encoding="utf-8"))["searches"]
    return [
        Search(
            row["name"],
            tuple(row["prompt_ids"]),
            row["width"],
            row["length_penalty"],
            tuple(Beam(tuple(beam["ids"]), beam["score"]) for beam in row["beams"]),
        )
        for row in rows
    ]


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


def compare(found: Sequence[api.GenerateResponse], beams: Sequence[Beam], eos: int) -> float:
    """Insist on the same hypotheses, with their ends; return the largest difference between two scores."""
    assert [tuple(answer.token_ids) for answer in found] == [beam.ids for beam in beams]
    assert [answer.score for answer in found] == pytest.approx([beam.score for beam in beams], abs=SCORE_TOLERANCE, rel=1e-6)
    for answer in found:
        ended = answer.token_ids[-1] == eos
        assert answer.finish_reason == (api.FINISH_REASON_EOS if ended else api.FINISH_REASON_LENGTH)
    return max(abs(answer.score - beam.score) for answer, beam in zip(found, beams, strict=True))
