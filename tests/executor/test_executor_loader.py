"""Folders that are whole, damaged, or of models that can't be served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor import families
from executor.loader import LoadedModel, load
from executor.progress import Progress
from kernels.interface import KvCache, LayerShape, StepRows
from kernels.registry import create
from kilburn.config import Dtype
from kilburn.errors import StartError
from tests.executor.executor_help import VOCAB, save_tiny

CPU = torch.device("cpu")


def load_here(folder: Path, *, dtype: Dtype = "auto", max_model_len: int | None = None) -> LoadedModel:
    return load(folder, device=CPU, dtype=dtype, backend=create("reference"), block_size=5, max_model_len=max_model_len)


def of_transformers(model: LoadedModel) -> Any:
    """Return the model as transformers has it, which there is on the general path."""
    assert model.model is not None
    return model.model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with several shards, whose head is not tied; copy it before you damage it."""
    import transformers

    folder = save_tiny(tmp_path_factory.mktemp("llama") / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "model")


# --------------------------------------------------------------------------------------------------------------- whole


def test_what_is_found_out_about_a_model(llama: Path) -> None:
    model = load_here(llama)
    assert model.shape.layers == (LayerShape(kv_heads=2, key_size=8, value_size=8),) * 3
    assert model.shape.block_size == 5
    assert model.shape.dtype == torch.float32
    assert [rule.window for rule in model.rules] == [None] * 3
    assert model.rules[0].scale == pytest.approx(8**-0.5)
    assert (model.context, model.vocab_size) == (families.Context(256, "the model"), VOCAB)
    assert not any(parameter.requires_grad for parameter in of_transformers(model).parameters())
    assert not of_transformers(model).training


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("Mistral", {"sliding_window": 7}, [7, 7, 7]),
        ("Mistral", {"sliding_window": None}, [None] * 3),
        ("Gemma2", {"sliding_window": 9, "head_dim": 8}, [9, None, 9]),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 4]),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": False}, [None] * 3),
    ],
)
def test_each_layers_window_is_what_its_mask_shows(
    family: str, options: dict[str, object], windows: list[int | None], tmp_path: Path
) -> None:
    model = load_here(save_tiny(tmp_path, family, options))
    assert [rule.window for rule in model.rules] == windows


def test_softcap_scale_and_sinks(tmp_path: Path) -> None:
    gemma = load_here(
        save_tiny(tmp_path / "gemma", "Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 25, "attn_logit_softcapping": 30.0})
    )
    assert gemma.rules[0].softcap == 30.0
    assert gemma.rules[0].scale == pytest.approx(0.2)
    oss = load_here(save_tiny(tmp_path / "oss", "GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 5}))
    sinks = oss.rules[0].sinks
    assert sinks is not None
    assert sinks.shape == (4,)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "float16", torch.float16),
    ],
)
def test_the_dtype_is_the_models_or_the_users(stored: torch.dtype, asked: Dtype, expected: torch.dtype, tmp_path: Path) -> None:
    model = load_here(save_tiny(tmp_path, dtype=stored), dtype=asked)
    assert of_transformers(model).dtype == model.shape.dtype == expected


def test_the_context_is_the_shorter_of_the_models_and_the_users(llama: Path) -> None:
    assert load_here(llama, max_model_len=100).context == families.Context(100, "--max-model-len")
    assert load_here(llama, max_model_len=1000).context == families.Context(256, "the model")


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_the_context_ends_where_a_sequence_would_change_anothers_numbers(rope_type: str) -> None:
    """Such a rotary embedding looks at the longest position of the whole batch."""
    from transformers import LlamaConfig

    parameters: dict[str, object] = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    parameters |= {"factor": 4.0} if rope_type == "dynamic" else {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=parameters)
    limits = families.context_limits(config)
    assert sorted(limit.tokens for limit in limits) == [64, 256]
    assert rope_type in limits[1].set_by


def test_only_the_wanted_rows_go_through_the_head(llama: Path) -> None:
    model, backend = load_here(llama), create("reference")
    frames = torch.zeros(3, backend.layout(model.shape).elements)
    rows = StepRows(0, (6,), (6,), torch.tensor([[0, 1]], dtype=torch.int32), torch.arange(6))
    forward = model.forward(backend, KvCache(model.shape, frames), 6, Progress())
    ids, positions = torch.arange(6), torch.arange(6)
    every = forward.logits(rows, ids, positions, torch.arange(6)).clone()
    some = forward.logits(rows, ids, positions, torch.tensor([4, 1])).clone()
    none = forward.logits(rows, ids, positions, torch.tensor([], dtype=torch.int64))
    torch.testing.assert_close(some, every[[4, 1]])
    assert none.shape == (0, VOCAB)


# ------------------------------------------------------------------------------------------------------------- damaged


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def without(tensor: str) -> Callable[[Path], object]:
    """Take a tensor out of its shard and out of the index."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        shard = folder / index["weight_map"].pop(tensor)
        tensors = load_file(shard)
        del tensors[tensor]
        save_file(tensors, shard, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def without_weights(folder: Path) -> Path:
    for file in folder.glob("model*"):
        file.unlink()
    return folder


def edit_config(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return damage


def shard(folder: Path, number: int = 2) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("config: not there", lambda f: (f / "config.json").unlink(), r"can't read .*config\.json: No such file"),
    ("config: not JSON", lambda f: (f / "config.json").write_text("{"), r"config\.json is damaged: "),
    ("config: not text", lambda f: (f / "config.json").write_bytes(b"\xff\xfe\xfa"), r"config\.json is damaged: "),
    ("config: no object", lambda f: (f / "config.json").write_text("[]"), r"config\.json is damaged: it holds no object"),
    ("config: no type", lambda f: (f / "config.json").write_text("{}"), r"config\.json names no model_type"),
    ("config: unknown type", edit_config(model_type="gpt9"), r"config\.json can't be used: .*gpt9"),
    ("config: own code", edit_config(model_type="gpt9", auto_map={"AutoConfig": "x.Y"}), "gpt9 models need Python code from"),
    ("config: quantized", edit_config(quantization_config={"quant_method": "gptq"}), "weights quantized by gptq"),
    ("config: other sizes", edit_config(intermediate_size=40), r"model\.layers\.0\.mlp\.\w+\.weight"),
    ("config: more layers", edit_config(num_hidden_layers=4), r"lacks the tensor model\.layers\.3\."),
    ("a shard is missing", lambda f: shard(f).unlink(), r"model-00003-of-\d+\.safetensors is missing"),
    ("a shard is cut short", lambda f: cut(shard(f)), r"model-00003-of-\d+\.safetensors is damaged"),
    ("a shard is empty", lambda f: shard(f).write_bytes(b""), r"model-00003-of-\d+\.safetensors is damaged"),
    ("a shard is text", lambda f: shard(f).write_text("<html>404</html>"), r"model-00003-of-\d+\.safetensors is damaged"),
    ("a shard is another", lambda f: shutil.copy(shard(f, 0), shard(f)), r"00003-of-\d+\.safetensors lacks .*, which"),
    ("the index is cut short", lambda f: cut(f / "model.safetensors.index.json"), r"index\.json is damaged"),
    ("the index has no map", lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    (
        "the index leads away",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}'),
        r"names a file outside of its folder: '\.\./x\.safetensors'",
    ),
    ("no weights", without_weights, "has no weights: neither model.safetensors nor"),
    (
        "the index is missing",
        lambda f: (f / "model.safetensors.index.json").unlink(),
        r"neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    (
        "an adapter",
        lambda f: (without_weights(f), (f / "adapter_config.json").write_text("{}")),
        "is an adapter; merge it",
    ),
    ("no head", without("lm_head.weight"), r"lacks the tensor lm_head\.weight"),
    ("no norm", without("model.layers.1.input_layernorm.weight"), r"lacks the tensor model\.layers\.1\.input_layernorm\.weight"),
]


@pytest.mark.parametrize(("damage", "reason"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_folder_is_refused_by_the_damages_name(damage: Callable[[Path], object], reason: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(StartError, match=reason) as caught:
        load_here(folder)
    assert "\n" not in str(caught.value)


def test_one_file_that_is_cut_short(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    cut(tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=r"model\.safetensors is damaged"):
        load_here(tmp_path)


def test_a_tied_head_need_not_be_stored(tmp_path: Path) -> None:
    save_tiny(tmp_path, options={"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_here(tmp_path).head_rows == VOCAB


@pytest.mark.parametrize("own", [False, True], ids=["the embeddings", "another"])
def test_a_stored_head_of_a_tied_model_is_what_transformers_makes_of_it(own: bool, tmp_path: Path) -> None:
    import transformers

    save_tiny(tmp_path, options={"tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (embeddings.flip(0) if own else embeddings).clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_output_embeddings().weight
    assert torch.equal(of_transformers(load_here(tmp_path)).get_output_embeddings().weight, expected)


def test_files_that_the_index_does_not_name_are_ignored(folder: Path) -> None:
    first = load_file(shard(folder, 0))
    save_file({name: tensor * 0 for name, tensor in first.items()}, folder / "a-stray.safetensors", metadata={"format": "pt"})
    (folder / "z-stray.safetensors").write_bytes(b"not even one")
    found = of_transformers(load_here(folder)).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in first.items())


# ----------------------------------------------------------------------------------------------------------- not served

ENCODER: dict[str, object] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}

REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("Falcon", {}, "falcon models can't be served: FalconForCausalLM does not use the attention interface"),
    ("Bloom", {"n_layer": 1, "n_head": 4}, "bloom models can't be served: they use ALiBi"),
    ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1}, "mpt models can't be served: they use ALiBi"),
    ("Mamba", {}, "mamba models can't be served: they keep a recurrent state"),
    ("Qwen3Next", {}, "qwen3_next models can't be served: they have layers of type linear_attention"),
    (
        "Llama4Text",
        {"attention_chunk_size": 32},
        "llama4_text models can't be served: they have layers of type chunked_attention",
    ),
    ("Bart", ENCODER, "bart models can't be served: they have an encoder"),
    ("Bert", {"is_decoder": False}, "bert models can't be served: one of its masks is neither causal nor a sliding window"),
    ("GPTNeo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "GPTNeoForCausalLM does not use the attention"),
    ("Clip", {}, "clip models can't be served: transformers has no causal language model for them"),
]


@pytest.mark.parametrize(("family", "options", "reason"), REFUSED, ids=[family for family, *_ in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(family: str, options: dict[str, object], reason: str, tmp_path: Path) -> None:
    import transformers

    if family == "Bert":
        save_tiny(tmp_path, family, options)
    else:  # told from the configuration: weights are not even looked for
        names = {"Clip": "CLIPConfig"}
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = getattr(transformers, names.get(family, f"{family}Config"))
        config(**(options if family == "Clip" else sizes | options)).save_pretrained(tmp_path)
    with pytest.raises(StartError, match=reason):
        load_here(tmp_path)


def test_a_state_beside_keys_and_values_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that nobody listed, which mixes each token with the one before it in the batch."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    folder = save_tiny(tmp_path)
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x + 0.1 * x.roll(1, dims=1)))
    with pytest.raises(StartError, match="llama models can't be served: its numbers through a block table are not its own"):
        load_here(folder)


def test_code_in_a_folder_is_not_needed_where_transformers_knows_the_model(folder: Path) -> None:
    edit_config(auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"})(folder)
    assert load_here(folder).head_rows == VOCAB


def test_weights_that_overflow_their_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1e5
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_here(tmp_path)
    with pytest.raises(StartError, match="its logits are not numbers in float16; give another --dtype"):
        load_here(tmp_path, dtype="float16")


def test_a_model_whose_logits_are_all_alike(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] *= 0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_here(tmp_path)


@pytest.mark.parametrize("room", [4, 5, 7, 23])
def test_a_model_of_few_positions(room: int, tmp_path: Path) -> None:
    model = load_here(save_tiny(tmp_path, "GPT2", {"num_key_value_heads": 4, "max_position_embeddings": room}))
    assert model.context.tokens == room


def test_a_model_of_too_few_positions(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="gpt2 models can't be served: it has room for 3 tokens"):
        load_here(save_tiny(tmp_path, "GPT2", {"num_key_value_heads": 4, "max_position_embeddings": 3}))


def test_a_context_of_unknown_length_has_to_be_given(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "context_limits", lambda config: [])
    assert load_here(llama, max_model_len=64).context.tokens == 64
    with pytest.raises(StartError, match="give --max-model-len"):
        load_here(llama)
