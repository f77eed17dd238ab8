"""The general path's packed products: the numbers of torch's, where they are not taken, and that they can be put back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.loader import load
from executor.packed import PackedEmbedding, PackedLinear, exchange
from kernels.cpu.backend import CpuBackend
from tests.executor.executor_help import VOCAB, save_tiny
from tests.kernels import backends

IDS = torch.arange(2 * 9).reshape(2, 9) * 5 % VOCAB

FAMILIES: list[tuple[str, dict[str, object], int]] = [
    ("Olmo2", {}, 3 * 7 + 1),
    ("GPT2", {"num_key_value_heads": 4}, 3 * 4 + 2),  # Conv1D, biases; the head and the embedding are one
    ("StableLm", {"tie_word_embeddings": True, "use_qkv_bias": True}, 3 * 7 + 2),
    ("Gemma3Text", {"head_dim": 8}, 3 * 7),  # its embedding is scaled, and is the head: both stay
    ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}, 3 * (4 + 3 + 1) + 1),
]


def cpu() -> CpuBackend:
    backend = backends.make(backends.NATIVE[-1]).backend
    assert isinstance(backend, CpuBackend)
    return backend


def transformers_own(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def assert_near(found: Tensor, expected: Tensor) -> None:
    """In bfloat16 values round otherwise here and there, and a router may send a token elsewhere: the middle one counts."""
    errors = (found - expected).float().abs() / float(expected.float().std())
    assert float(errors.max()) < 1e-4 if expected.dtype == torch.float32 else float(errors.median()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "options", "count"), FAMILIES, ids=[family for family, *_ in FAMILIES])
def test_numbers_stay_and_all_can_be_put_back(
    family: str, options: dict[str, object], count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = transformers_own(save_tiny(tmp_path, family, options, vectors=0.1), dtype)
    before, weights = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exchanged = exchange(model, cpu().instructions)
    assert len(exchanged) == count
    assert_near(logits(model), before)
    exchanged.undo()
    assert_near(logits(model), before)  # not bitwise: torch's sums depend on where a weight lies
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())


def test_a_row_is_the_same_whatever_rows_it_comes_with(tmp_path: Path) -> None:
    model = transformers_own(save_tiny(tmp_path, "Olmo2"), torch.bfloat16)
    exchange(model, cpu().instructions)
    part = model.model.layers[0].mlp.up_proj
    assert isinstance(part, PackedLinear)
    rows = torch.randn(3, 11, 32).bfloat16()
    whole = part(rows)
    assert whole.shape == (3, 11, 48)
    assert torch.equal(part(rows[1:2, 4:5]), whole[1:2, 4:5])
    assert torch.equal(part(rows.transpose(0, 1)), whole.transpose(0, 1))
    assert part(rows[:, :0]).shape == (3, 0, 48)


def test_a_loaded_model_has_them_and_takes_no_more_memory(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "StableLm", {"tie_word_embeddings": True, "vocab_size": 96, "hidden_size": 64})
    plain = transformers_own(folder, torch.float32).get_memory_footprint()
    model = load(folder, device=torch.device("cpu"), dtype="auto", backend=cpu(), block_size=4, max_model_len=None)
    assert model.model is not None
    assert isinstance(model.model.get_output_embeddings(), PackedLinear)
    assert isinstance(model.model.get_input_embeddings(), PackedEmbedding)
    assert plain <= model.weights_bytes < 1.4 * plain  # outputs are rounded up to 32 in a packed weight
    assert "packed" not in model.why_general


def test_a_model_that_reads_its_weights_itself_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    def forward(self: Any, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(x @ self.gate_proj.weight.T) * self.up_proj(x))
        return down

    monkeypatch.setattr(Olmo2MLP, "forward", forward)
    folder = save_tiny(tmp_path, "Olmo2")
    model = load(folder, device=torch.device("cpu"), dtype="auto", backend=cpu(), block_size=4, max_model_len=None)
    assert (
        "its products are torch's, as with packed weights it fails: it fails on a few tokens: AttributeError" in model.why_general
    )
    assert model.model is not None
    assert type(model.model.get_output_embeddings()) is torch.nn.Linear
