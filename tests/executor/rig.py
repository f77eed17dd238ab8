"""A runner over a poisoned pool, and a careless memmgr beside it; models for it, and what the attention is computed with.

Knows the executor's parts from the model to the result; not processes or messages between them.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from executor.batch import Limits, Slots
from executor.loader import LoadedModel, load
from executor.pool import HEADER_VERSION, PoolSpec, device_pool
from executor.progress import Progress
from executor.runner import Runner
from kernels.interface import AttentionBackend
from kernels.reference import ReferenceBackend
from kilburn.config import Dtype, ForwardPath
from kilburn.v1.engine_pb2 import Chunk, PoolHeader, SamplingParams, SlotOpen, StepResult
from kilburn.v1.inference_pb2 import TokenLogprob
from tests.executor.executor_help import Tables, plan

CPU = torch.device("cpu")
PROMPTS = ([5, 17, 3, 88, 42, 9, 61, 2, 2, 70, 31, 8, 19], [1], [96, 4, 50, 23, 77, 12, 6], list(range(40, 75)))


def load_here(
    folder: Path,
    block_size: int,
    backend: AttentionBackend[Any] | None = None,
    dtype: Dtype = "float32",
    forward: ForwardPath = "auto",
) -> LoadedModel:
    """Load a model; what is not said is the reference, in float32."""
    return load(
        folder,
        device=CPU,
        dtype=dtype,
        backend=backend or ReferenceBackend(),
        block_size=block_size,
        max_model_len=None,
        forward=forward,
    )


def in_blocks_of(model: LoadedModel, block_size: int) -> LoadedModel:
    """Return the same model for a pool of other blocks."""
    return replace(model, shape=replace(model.shape, block_size=block_size))


@dataclass
class Rig:
    """A runner over a poisoned pool, and the plans that a careless memmgr would make for it."""

    model: LoadedModel
    backend: AttentionBackend[Any] = field(default_factory=ReferenceBackend)
    num_blocks: int = 200
    host_blocks: int = 0
    progress: Progress = field(default_factory=Progress)
    step: int = 0
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))  # of each slot, from `generate`

    def __post_init__(self) -> None:
        layout = self.backend.layout(self.model.shape)
        spec = PoolSpec(self.num_blocks, layout.elements, self.model.shape.dtype)
        self.pool = device_pool(spec, CPU, PoolHeader(version=HEADER_VERSION))
        self.pool.poison()
        self.pool.add_host(self.host_blocks)
        block_size = self.model.shape.block_size
        self.tables = Tables(self.num_blocks, block_size)
        limits = Limits(self.num_blocks, block_size, self.model.context.tokens, self.model.vocab_size, 16, 256, self.host_blocks)
        self.slots = Slots(limits)
        ticks = itertools.count(0, 1000)
        self.runner = Runner(
            model=self.model,
            backend=self.backend,
            pool=self.pool,
            slots=self.slots,
            progress=self.progress,
            clock_ns=lambda: next(ticks),
            poison=True,
            max_step_tokens=256,
        )

    def run(
        self,
        *,
        chunks: Sequence[Chunk] = (),
        samples: Sequence[tuple[int, int, int]] = (),
        opens: Sequence[SlotOpen] = (),
        closes: Sequence[int] = (),
        copies: Sequence[tuple[int, int]] = (),
        freed: Sequence[int] = (),
        outs: Sequence[tuple[int, int]] = (),
        ins: Sequence[tuple[int, int]] = (),
    ) -> StepResult:
        self.step += 1
        return self.runner.run(
            plan(
                self.step,
                chunks=chunks,
                samples=samples,
                opens=opens,
                closes=closes,
                copies=copies,
                freed=freed,
                outs=outs,
                ins=ins,
            )
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], outputs: int, chunk: int, params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Serve all prompts at once, each prefilled in chunks of its own size, so that steps mix chunks and decodes."""
        found: list[list[int]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        opens = [SlotOpen(slot=slot, sampling=params[slot], index=0) for slot in range(len(prompts))]
        while any(len(tokens) < outputs for tokens in found):
            chunks, samples = [], []
            for slot, prompt in enumerate(prompts):
                if len(found[slot]) == outputs:
                    continue
                start = done[slot]
                if start < len(prompt):
                    ids = prompt[start : start + chunk + slot]
                    end = start + len(ids)
                    chunks.append(Chunk(slot=slot, start=start, token_ids=ids, new_blocks=self.tables.grow(slot, end)))
                else:
                    end = start + 1
                    chunks.append(Chunk(slot=slot, start=start, new_blocks=self.tables.grow(slot, end)))
                if end >= len(prompt):
                    samples.append((len(chunks) - 1, slot, len(found[slot])))
                done[slot] = end
            result = self.run(chunks=chunks, samples=samples, opens=opens)
            opens = []
            assert list(result.failed) == []
            for (_, slot, _), token in zip(samples, result.token_ids, strict=True):
                found[slot].append(token)
            for one in result.logprobs:
                self.logprobs[samples[one.sample][1]].append(one.logprob)
        return found
