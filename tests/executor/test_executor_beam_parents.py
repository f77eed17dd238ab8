"""The recorder of beam searches notes what a plain beam search does, prompt by prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import beam_parents
from memmgr.simulate.beams import Parents, parse
from tests.e2e.tiny import save

STEPS = 12
PROMPTS = ("Hello.", "A rather longer one, so that the others are padded.", "?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("beams"), spread=0.3)


@torch.no_grad()
def plain_search(folder: Path, prompt: str, width: int) -> Parents:
    """Search without a cache, every sequence whole at every step, no end of sequence."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    beams: list[tuple[float, list[int]]] = [(0.0, ids)]
    found: list[tuple[int, ...]] = []
    for _ in range(STEPS):
        scores = model(torch.tensor([tokens for _, tokens in beams])).logits[:, -1].log_softmax(-1)
        scores[:, tokenizer.eos_token_id] = -torch.inf
        scores += torch.tensor([[total] for total, _ in beams])
        best = scores.flatten().topk(width)
        places = [divmod(place, scores.shape[1]) for place in best.indices.tolist()]
        beams = [(total, [*beams[beam][1], token]) for total, (beam, token) in zip(best.values.tolist(), places, strict=True)]
        found.append(tuple(beam for beam, _ in places))
    return tuple(found)


def test_the_parents_are_those_of_a_plain_search(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_parents, "PROMPTS", PROMPTS)
    monkeypatch.setattr(beam_parents, "_WIDTHS", (2, 3))
    monkeypatch.setattr(beam_parents, "_BATCH", 2)
    out = tmp_path / "parents.json"
    words = ["--model", str(folder), "--steps", str(STEPS), "--out", str(out)]
    done = CliRunner().invoke(beam_parents.main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert json.loads(text)["model"] == folder.name
    searches = parse(text)
    assert searches == {width: tuple(plain_search(folder, prompt, width) for prompt in PROMPTS) for width in (2, 3)}
    assert len({parents for found in searches.values() for parents in found}) == 6, "they differ, so that a mix-up would show"
