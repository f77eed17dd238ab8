"""Small models of many families through the executor, by each way to attend, against transformers: tokens and log-probabilities.

In float32 they are those of transformers. In bfloat16 no two ways to compute are alike: there the distance from float32 counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionBackend
from kilburn.v1.engine_pb2 import Chunk, SamplingParams, SlotOpen
from tests.executor.executor_help import VOCAB, greedy, sampling, save_tiny
from tests.executor.rig import PROMPTS, Rig, in_blocks_of, load_here
from tests.kernels import backends

OUTPUTS = 12


@dataclass(frozen=True)
class Asked:
    """A saved model, prompts for it, and what transformers answers."""

    folder: Path
    prompts: Sequence[list[int]]
    answers: list[list[int]]
    is_common: bool  # is there a fast path for it?


FAMILIES: list[tuple[str, dict[str, object]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
    ("Mistral", {"sliding_window": 6, "head_dim": 12}),
    ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    ("GPT2", {"num_key_value_heads": 4, "n_positions": 128}),
    ("StableLm", {}),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("Phi3", {}),
    ("Phi3", {"partial_rotary_factor": 0.5, "head_dim": 8, "tie_word_embeddings": True}),
    ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    ("GPTNeoX", {}),
    ("Mixtral", {"num_local_experts": 4}),
    ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 5}),
    (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _ in FAMILIES])
def member(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Return a model of a family; made once for all backends."""
    folder = save_tiny(tmp_path_factory.mktemp("family"), *request.param)
    is_common = request.param[0] in {"Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "SmolLM3"}
    return Asked(folder, PROMPTS, [greedy(folder, prompt, OUTPUTS) for prompt in PROMPTS], is_common)


def test_tokens_are_those_of_transformers(member: Asked, backend: AttentionBackend[Any]) -> None:
    """Chunks and decodes mixed, tables in no order, blocks of three sizes, everything unwritten being NaN."""
    model = load_here(member.folder, 7, backend)
    assert (model.fused is not None) == (isinstance(backend, CpuBackend) and member.is_common), model.why_general
    for block_size, chunk in ((1, 4), (7, 5), (16, 40)):
        rig = Rig(in_blocks_of(model, block_size), backend)
        assert rig.generate(PROMPTS, OUTPUTS, chunk, [sampling()] * len(PROMPTS)) == member.answers


def test_the_general_path_gives_the_same(member: Asked) -> None:
    """On the native kernels, by the modules of transformers; the other tests take the fast path there where it can be had."""
    backend = backends.make(backends.NATIVE[-1]).backend
    model = load_here(member.folder, 7, backend, forward="general")
    assert model.fused is None
    assert Rig(model, backend).generate(PROMPTS, OUTPUTS, 5, [sampling()] * len(PROMPTS)) == member.answers


WINDOWS: list[tuple[str, dict[str, object]]] = [
    ("Mistral", {"sliding_window": 32}),
    ("Mistral", {"sliding_window": None}),
    ("Gemma2", {"head_dim": 8, "sliding_window": 32}),
    ("Qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}),
]


@pytest.fixture(scope="module", params=WINDOWS, ids=["all", "none", "every other", "the last"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Return a model whose layers, so many of them, have a window of 32; made once for all backends."""
    folder = save_tiny(tmp_path_factory.mktemp("windowed"), *request.param)
    prompts = [[(length * 7 + at * at * 5) % VOCAB for at in range(length)] for length in (20, 32, 33, 100)]
    is_common = request.param[0] != "Gemma2"
    return Asked(folder, prompts, [greedy(folder, prompt, OUTPUTS) for prompt in prompts], is_common)


def test_prompts_around_the_edge_of_a_window(windowed: Asked, backend: AttentionBackend[Any]) -> None:
    """In one chunk and in several, then once more on top of the first blocks of the same prompt."""
    model = load_here(windowed.folder, 8, backend)
    for chunk in (200, 9):
        rig = Rig(model, backend)
        assert rig.generate(windowed.prompts, OUTPUTS, chunk, [sampling()] * 4) == windowed.answers
        for slot, (prompt, answer) in enumerate(zip(windowed.prompts, windowed.answers, strict=True), start=8):
            shared = (len(prompt) - 1) // 8
            rig.tables.owned[slot] = rig.tables.owned[slot - 8][:shared]
            blocks = [*rig.tables.owned[slot], *rig.tables.grow(slot, len(prompt))]
            rest = Chunk(slot=slot, start=8 * shared, token_ids=prompt[8 * shared :], new_blocks=blocks)
            found = rig.run(opens=[SlotOpen(slot=slot, sampling=sampling())], chunks=[rest], samples=[(0, slot, 0)])
            assert list(found.token_ids) == answer[:1]


@lru_cache(maxsize=2)
def theirs(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model as transformers runs it; backends take turns at one model, so the last ones are kept."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def log_probabilities(folder: Path, dtype: torch.dtype, prompt: list[int], output: list[int]) -> Tensor:
    """Return what transformers makes of each token of the output, [outputs, vocabulary]; `dtype` is what it computes in."""
    with torch.inference_mode():
        logits = theirs(folder, dtype)(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


def around_an_edge(block_size: int) -> list[list[int]]:
    """Return prompts that end before, at and after the edge of a block."""
    return [[(seed * 31 + at * at) % VOCAB for at in range(2 * block_size + seed)] for seed in (-1, 0, 1)]


HEADS = [(6, 1), (7, 1), (12, 2), (14, 2), (15, 5), (24, 8)]


@pytest.fixture(scope="module", params=HEADS, ids=[f"{heads} over {kv_heads}" for heads, kv_heads in HEADS])
def grouped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with so many query heads over so many KV heads; made once for all backends."""
    heads, kv_heads = request.param
    sizes = {"hidden_size": 4 * heads, "head_dim": 4, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return save_tiny(tmp_path_factory.mktemp("grouped"), options=sizes)


def test_log_probabilities_stay_those_of_transformers_over_the_edges_of_blocks(
    grouped: Path, backend: AttentionBackend[Any]
) -> None:
    """Prompts that end before, at and after the edge of a block, then decodes over three more edges; odd numbers of heads."""
    params = SamplingParams(temperature=1.0, top_p=1.0, seed=5, with_logprobs=True, top_logprobs=3)
    model = load_here(grouped, 4, backend)
    for block_size in (4, 5, 16):
        prompts = around_an_edge(block_size)
        rig = Rig(in_blocks_of(model, block_size), backend)
        outputs = rig.generate(prompts, 3 * block_size + 2, 99, [params] * len(prompts))
        for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            expected = log_probabilities(grouped, torch.float32, prompt, output)
            for row, found in zip(expected, rig.logprobs[slot], strict=True):
                assert found.logprob == pytest.approx(float(row[found.token_id]), abs=1e-4)
                assert [top.logprob for top in found.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
                assert sum(math.exp(top.logprob) for top in found.top) <= 1 + 1e-5


HALVES: list[tuple[str, dict[str, object]]] = [
    ("Llama", {"hidden_size": 48, "num_attention_heads": 6}),
    ("Mistral", {"sliding_window": 6}),
    ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    ("GptOss", {"head_dim": 8, "num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 5}),
]


@pytest.fixture(scope="module", params=HALVES, ids=[family for family, _ in HALVES])
def halved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose weights are bfloat16; made once for all backends."""
    return save_tiny(tmp_path_factory.mktemp("halved"), *request.param, dtype=torch.bfloat16)


def test_in_bfloat16_log_probabilities_are_as_near_as_those_of_transformers(halved: Path, backend: AttentionBackend[Any]) -> None:
    """As near to those in float32 from the same weights, over the edges of blocks."""
    params = SamplingParams(temperature=1.0, top_p=1.0, seed=5, with_logprobs=True)
    prompts = around_an_edge(7)
    rig = Rig(load_here(halved, 7, backend, "bfloat16"), backend)
    outputs = rig.generate(prompts, 23, 9, [params] * len(prompts))
    our_errors, their_errors = [], []
    for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        exact, rounded = (log_probabilities(halved, dtype, prompt, output) for dtype in (torch.float32, torch.bfloat16))
        found = torch.tensor([one.logprob for one in rig.logprobs[slot]])
        chosen = torch.tensor(output)[:, None]
        our_errors.append(found - exact.gather(1, chosen)[:, 0])
        their_errors.append((rounded - exact).gather(1, chosen)[:, 0])
    assert root_mean_square(our_errors) < 1.3 * root_mean_square(their_errors)


def root_mean_square(parts: Sequence[Tensor]) -> float:
    """Return how large the numbers are."""
    return math.sqrt(float(torch.cat(list(parts)).square().mean()))
