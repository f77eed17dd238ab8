"""A model folder: what is taken from it, and what is wrong with a damaged one."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gateway.errors import CallError, Code
from gateway.model import TextModel, load
from gateway.tokenizer import Tokenizer, byte_names
from gateway.validate import SamplingDefaults
from kilburn.errors import StartError
from kilburn.v1 import inference_pb2 as api
from tests.gateway.gateway_support import (
    CONTEXT_LENGTH,
    END,
    VOCAB_SIZE,
    byte_fallback_tokenizer,
    metaspace_tokenizer,
    wordpiece_tokenizer,
    write_model,
)


def _without_some_bytes() -> Tokenizer:
    """Return a byte-level tokenizer that has never seen most bytes: they vanish."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(["the kiln burned"] * 2, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))


TOKENIZER_WITHOUT_SOME_BYTES = _without_some_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return load(folder)


def chat(*turns: tuple[str, str], continue_final_message: bool = False) -> api.Chat:
    messages = [api.ChatMessage(role=role, content=content) for role, content in turns]
    return api.Chat(messages=messages, continue_final_message=continue_final_message)


def test_what_a_folder_says(model: TextModel, folder: Path) -> None:
    assert model.folder == folder
    assert model.vocab_size == VOCAB_SIZE
    assert model.tokens <= VOCAB_SIZE
    assert model.defaults == SamplingDefaults()
    assert model.not_applied == ()
    assert len(model.fingerprint) == 64


def test_text_goes_there_and_back(model: TextModel) -> None:
    ids = model.tokenizer.encode(f"The kiln\x00{END}é")
    assert model.tokenizer.decode(ids) == "The kiln\x00é"
    assert model.tokenizer.decode(ids, keep_special_tokens=True) == f"The kiln\x00{END}é"
    assert model.tokenizer.decode([]) == ""


def test_ids_between_the_tokenizer_and_the_vocabulary_have_no_text(model: TextModel) -> None:
    (a,) = model.tokenizer.encode("a")
    for keep in (False, True):
        assert model.tokenizer.decode([a, VOCAB_SIZE - 1, a], keep) == "aa"


def test_chats_are_rendered_with_the_template(model: TextModel) -> None:
    conversation = (("user", "Hello"), ("assistant", "Well"))
    assert model.tokenizer.render(chat(*conversation)) == "<|user|>Hello<|end|><|assistant|>Well<|end|><|assistant|>"
    continued = model.tokenizer.render(chat(*conversation, continue_final_message=True))
    assert continued == "<|user|>Hello<|end|><|assistant|>Well"


@pytest.mark.parametrize("turns", [[("robot", "x")], [("robot", "\n" * 1000)]])
def test_what_the_template_refuses(model: TextModel, turns: list[tuple[str, str]]) -> None:
    with pytest.raises(CallError) as caught:
        model.tokenizer.render(chat(*turns))
    assert caught.value.code is Code.BAD_CHAT
    assert "no robots here" in caught.value.message


def test_a_model_without_a_template(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    model = load(folder)
    assert not model.tokenizer.has_chat_template
    with pytest.raises(CallError) as caught:
        model.tokenizer.render(chat(("user", "Hello")))
    assert caught.value.code is Code.BAD_CHAT


def test_ends_of_sequence_come_from_every_source(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"eos_token_id": 5, "text_config": {"eos_token_id": [6]}}, {"eos_token_id": [7, 5, 8]})
    assert load(folder).eos_ids == (5, 6, 7, 8, 0)


def test_an_end_of_sequence_that_is_no_token_is_none(tmp_path: Path) -> None:
    assert load(write_model(tmp_path, {"eos_token_id": -1}, {"eos_token_id": [VOCAB_SIZE, None]})).eos_ids == (0,)


def test_sampling_defaults_are_the_generation_config_s(tmp_path: Path) -> None:
    generation = {"temperature": 0.5, "top_k": 40, "top_p": None, "repetition_penalty": 1.1, "num_beams": 1, "min_length": 3}
    model = load(write_model(tmp_path, generation=generation))
    assert model.defaults == SamplingDefaults(temperature=0.5, top_k=40, repetition_penalty=1.1)
    assert model.not_applied == ("min_length",)


def test_a_vocabulary_size_of_a_nested_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"vocab_size": None, "text_config": {"vocab_size": 500}})
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).vocab_size == 500


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def truncate_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:1000])


def empty_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")


def leave_only_a_sentencepiece_model(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"no pieces")


def damage(name: str, content: str) -> Any:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


@pytest.mark.parametrize(
    ("do_damage", "words"),
    [
        (remove_tokenizer, "tokenizer.json is missing"),
        (truncate_tokenizer, "tokenizer.json is damaged"),
        (empty_vocabulary, "tokenizer"),
        (leave_only_a_sentencepiece_model, r"tokenizer\.json is missing, and no tokenizer can be made of tokenizer\.model"),
        (damage("config.json", "{"), "config.json is damaged"),
        (damage("config.json", "[]"), "config.json is damaged"),
        (damage("config.json", '{"model_type": "llama", "vocab_size": 100}'), "they are of two models"),
        (damage("generation_config.json", "nonsense"), "generation_config.json is damaged"),
        (damage("generation_config.json", '{"top_p": 0}'), "top_p is 0"),
        (damage("generation_config.json", '{"temperature": "hot"}'), "generation_config.json is damaged"),
        (damage("tokenizer_config.json", "{"), "tokenizer_config.json is damaged"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, do_damage: Any, words: str) -> None:
    folder = write_model(tmp_path)
    do_damage(folder)
    with pytest.raises(StartError, match=words) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncation_in_the_tokenizer_s_file_does_not_cut_prompts(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=8)
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder).tokenizer
    text = "The capital of France is Paris."
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet=st.characters(max_codepoint=0x1F9FF, exclude_categories=["Cs"]) | st.sampled_from(" ka\x16")))
def test_a_text_has_at_least_so_many_tokens(model: TextModel, text: str) -> None:
    for tokenizer in (model.tokenizer, TOKENIZER_WITHOUT_SOME_BYTES):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_the_least_number_of_tokens_is_of_use_or_nothing(model: TextModel) -> None:
    assert model.tokenizer.least_tokens("kiln " * 100_000) > CONTEXT_LENGTH
    assert TOKENIZER_WITHOUT_SOME_BYTES.least_tokens("\x16" * 100_000) == 0
    for raw in (byte_fallback_tokenizer(), metaspace_tokenizer(), wordpiece_tokenizer()):
        assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw)).least_tokens("kiln " * 100_000) == 0


@given(text=st.text(max_size=40) | st.lists(st.sampled_from([END, "<|user|>", " kiln", "é"])).map("".join))
def test_encoding_is_that_of_transformers(folder: Path, model: TextModel, text: str) -> None:
    assert model.tokenizer.encode(text) == reference(folder).encode(text)


@functools.cache
def reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_bytes_are_written_as_gpt_2_writes_them() -> None:
    assert dict(enumerate(byte_names())) == bytes_to_unicode()


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('ran')\nclass Evil: ...\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}))
    with pytest.raises(StartError, match="custom code"):
        load(folder)


def test_nothing_of_the_gateway_imports_torch(folder: Path) -> None:
    """transformers imports it where it is installed, unless it is told that it is not."""
    program = (
        "import sys\nfrom pathlib import Path\nimport gateway.service\nassert 'torch' not in sys.modules\n"
        "from gateway.model import keep_torch_out, load\nkeep_torch_out()\n"
        f"model = load(Path({str(folder)!r}))\nassert sys.modules['torch'] is None\n"
        "assert model.tokenizer.decode(model.tokenizer.encode('Paris')) == 'Paris'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
