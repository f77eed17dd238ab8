"""What the executor's tests share: tiny models with random weights, and step plans made by hand."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kilburn.v1.engine_pb2 import BlockCopy, Chunk, SampleRow, SamplingParams, SlotOpen, StepPlan

VOCAB = 97


def save_tiny(
    folder: Path,
    family: str = "Llama",
    options: Mapping[str, object] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    vectors: float = 0.0,
    seed: int = 0,
) -> Path:
    """Save a random model of a family whose weights are large enough that attention matters, and return its folder.

    `vectors` is by how much biases, sinks and the weights of norms deviate from what transformers begins with: mostly 0 or 1.
    """
    import transformers

    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **(options or {})})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
        elif vectors:
            parameter.data.add_(torch.randn_like(parameter), alpha=vectors)
    model.save_pretrained(folder)
    return folder


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return what transformers generates."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True
        )
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def sampling(*, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> SamplingParams:
    """Return parameters; greedy by default."""
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


@dataclass
class Tables:
    """Hands out blocks in a scattered order, as a memmgr that has run for long would."""

    num_blocks: int
    block_size: int
    used: int = 0
    owned: dict[int, list[int]] = field(default_factory=dict)

    def grow(self, slot: int, tokens: int) -> list[int]:
        """Return the blocks that slot's table needs to hold so many tokens."""
        table = self.owned.setdefault(slot, [])
        fresh: list[int] = []
        while (len(table) + len(fresh)) * self.block_size < tokens:
            # 7919 is prime, so this walks through all blocks in no order.
            fresh.append(self.used * 7919 % self.num_blocks)
            self.used += 1
        assert self.used <= self.num_blocks
        table += fresh
        return fresh


def plan(
    step: int,
    *,
    chunks: Iterable[Chunk] = (),
    samples: Iterable[tuple[int, int, int]] = (),
    opens: Iterable[SlotOpen] = (),
    closes: Iterable[int] = (),
    copies: Iterable[tuple[int, int]] = (),
    freed: Iterable[int] = (),
    outs: Iterable[tuple[int, int]] = (),
    ins: Iterable[tuple[int, int]] = (),
) -> StepPlan:
    """Return a step plan; samples are (chunk, slot, position)."""
    return StepPlan(
        step=step,
        chunks=chunks,
        samples=[SampleRow(chunk=chunk, slot=slot, position=position) for chunk, slot, position in samples],
        opens=opens,
        closes=closes,
        copies=[BlockCopy(source=source, destination=destination) for source, destination in copies],
        freed_blocks=freed,
        swap_outs=[BlockCopy(source=block, destination=place) for block, place in outs],
        swap_ins=[BlockCopy(source=place, destination=block) for place, block in ins],
    )
