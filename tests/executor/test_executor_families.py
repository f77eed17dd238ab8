"""Seventeen families, from a folder to tokens: memmgr's own session plans, the runner obeys, and transformers says what is right.

Prompts end before, at and after the edge of a block; each is served alone and all of them together, first with nothing cached and
then with every full block of the prompt cached already. Weights are random; their seeds and spreads are such that every output
varies, and that the best two logits of each step are apart: what differs is then a fault, and no tie that rounding decides. Both
are asserted.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from executor.batch import Limits as ExecutorLimits
from executor.batch import Slots
from executor.loader import LoadedModel
from executor.pool import HEADER_VERSION, PoolSpec, device_pool
from executor.progress import Progress
from executor.runner import Runner
from kernels.cpu.backend import CpuBackend
from kilburn.config import ForwardPath
from kilburn.limits import PROTOCOL
from kilburn.v1.engine_pb2 import ExecutorHello, ModelInfo, PoolHeader, StepResult
from memmgr.core.table import MemoryCounters
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import EndCode, Limits, NewToken, RequestEnd, Submission
from memmgr.session import Session, StepTotals, Totals
from tests.executor.executor_help import VOCAB, sampling, save_tiny
from tests.executor.rig import CPU, load_here
from tests.kernels import backends

BLOCK: Final = 16
LENGTHS: Final = (1, 15, 16, 17, 100)
OUTPUTS: Final = 32

#: Of a step, less than the longest prompt: it is computed in chunks, beside the decodes of the others.
STEP_TOKENS: Final = 64

BLOCKS: Final = 100

#: No two begin with the same token, so that none finds another's blocks.
PROMPTS: Final = [[(length * 11 + at * at * 7 + at) % VOCAB for at in range(length)] for length in LENGTHS]

#: Least distance of the best two logits; two ways to compute one in float32 differ by about 1e-5 at this spread.
LEAST_GAP: Final = 1e-3

#: Different tokens in each output, at least.
LEAST_VARIETY: Final = 5

#: A window shorter than the longest prompt, and no multiple of a block.
WINDOW: Final = 23

FAMILIES: list[tuple[str, dict[str, object]]] = [
    ("Llama", {}),
    ("Mistral", {"sliding_window": WINDOW}),
    ("Qwen2", {}),
    (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
    ),
    ("Qwen3", {"head_dim": 16}),
    ("Gemma2", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 4.0}),
    (
        "Gemma3Text",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("Phi3", {}),
    ("GPT2", {"num_key_value_heads": 4}),
    ("GPTNeoX", {}),
    ("Olmo2", {}),
    ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.5, "logits_scaling": 2.0}),
    ("StableLm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    ("Starcoder2", {"sliding_window": WINDOW}),
    ("Mixtral", {"num_local_experts": 4}),
    ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": WINDOW}),
    ("SmolLM3", {"no_rope_layer_interval": 2}),
]

#: Where another seed than 0 is wanted, and how far vectors are spread: Gemma's embedding is its head too and counts for much
#: beside normed layers, so that a token is followed by itself unless the norms' weights are large.
SEEDS: Final = {"Qwen2Moe": 1, "GPTNeoX": 1, "Gemma2": 1, "Gemma3Text": 9}
SPREADS: Final = {"Gemma2": 2.0, "Gemma3Text": 2.0}

FAST: Final = frozenset({"Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "SmolLM3"})

#: Each family by the modules of transformers, and by the fast path where it has one.
CASES: Final[list[tuple[str, ForwardPath]]] = [
    (family, path) for family, _ in FAMILIES for path in ("general", "fast") if path == "general" or family in FAST
]


@dataclass(frozen=True)
class Asked:
    """A saved model, and what transformers generates from each prompt."""

    folder: Path
    answers: list[list[int]]


def answer(folder: Path) -> Asked:
    """Let transformers generate, and insist on outputs that show something."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers, gaps = [], []
    for prompt in PROMPTS:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=OUTPUTS,
                min_new_tokens=OUTPUTS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        answers.append(found.sequences[0, len(prompt) :].tolist())
        best = torch.cat(found.logits).topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
    assert min(gaps) > LEAST_GAP, "a tie, nearly: another seed"
    assert min(len(set(output)) for output in answers) >= LEAST_VARIETY, "an output that hardly varies: another seed"
    return Asked(folder, answers)


@pytest.fixture(scope="module")
def asked() -> dict[str, Asked]:
    """Return what was asked of transformers, by family; empty at first."""
    return {}


class Served:
    """A model behind memmgr's own session, in one process."""

    def __init__(self, model: LoadedModel, backend: CpuBackend) -> None:
        layout = backend.layout(model.shape)
        pool = device_pool(PoolSpec(BLOCKS, layout.elements, model.shape.dtype), CPU, PoolHeader(version=HEADER_VERSION))
        pool.poison()
        context = model.context.tokens
        most = len(PROMPTS)
        self._runner = Runner(
            model=model,
            backend=backend,
            pool=pool,
            slots=Slots(ExecutorLimits(BLOCKS, BLOCK, context, model.vocab_size, most, STEP_TOKENS)),
            progress=Progress(),
            clock_ns=itertools.count().__next__,
            poison=True,
            max_step_tokens=STEP_TOKENS,
        )
        info = ModelInfo(
            fingerprint="families", context_length=context, vocab_size=model.vocab_size, block_size=BLOCK, total_blocks=BLOCKS
        )
        hello = ExecutorHello(protocol=PROTOCOL, model=info, max_slots=most, max_step_tokens=STEP_TOKENS)
        limits = Limits(max_running=most, max_waiting=most, max_step_tokens=STEP_TOKENS, context_length=context)
        totals = Totals(MemoryCounters(), ScheduleCounters(), StepTotals())
        self._session = Session(1, hello, limits, totals, 0.0, prefix_cache=True)
        self._handles = itertools.count()

    def ask(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Serve prompts together; return the tokens of each, and how many tokens of each were cached."""
        handles = [next(self._handles) for _ in prompts]
        outputs: dict[int, list[int]] = {handle: [] for handle in handles}
        cached: dict[int, int] = {}
        for handle, prompt in zip(handles, prompts, strict=True):
            submission = Submission(
                key=(1, handle),
                tenant="a",
                request_id=str(handle),
                prompt=array("I", prompt),
                sampling=sampling(),
                max_tokens=OUTPUTS,
                stop_token_ids=frozenset(),
            )
            assert self._session.scheduler.submit(submission, 0.0)
        # As in two processes: while a plan is computed, the next one is out already.
        results: list[StepResult] = []
        while len(cached) < len(handles):
            message = self._session.next_plan(0.0)
            if message is not None:
                results.append(self._runner.run(message))
            else:
                self._session.take_result(results.pop(0), 0.0)
            for event in self._session.scheduler.take_events():
                if isinstance(event, NewToken):
                    outputs[event.key[1]].append(event.token)
                elif isinstance(event, RequestEnd):
                    assert event.code == EndCode.OK, event.message
                    cached[event.key[1]] = event.cached_tokens
        for result in results:
            self._session.take_result(result, 0.0)
        self._session.scheduler.memory.check_invariants()
        return [outputs[handle] for handle in handles], [cached[handle] for handle in handles]


@pytest.mark.parametrize(("family", "path"), CASES, ids=[f"{family}-{path}" for family, path in CASES])
def test_tokens_are_those_of_transformers(
    family: str, path: ForwardPath, asked: dict[str, Asked], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if family not in asked:
        seed, spread = SEEDS.get(family, 0), SPREADS.get(family, 0.1)
        folder = save_tiny(tmp_path_factory.mktemp(family), family, dict(FAMILIES)[family], vectors=spread, seed=seed)
        asked[family] = answer(folder)
    answers = asked[family].answers
    backend = backends.make(backends.NATIVE[-1]).backend
    assert isinstance(backend, CpuBackend)
    model = load_here(asked[family].folder, BLOCK, backend, forward=path)
    assert (model.fused is not None) == (path == "fast")

    alone = Served(model, backend)
    for warm in (False, True):
        for prompt, expected in zip(PROMPTS, answers, strict=True):
            (found,), (cached,) = alone.ask([prompt])
            assert found == expected, f"{len(prompt)} tokens alone, {cached} of them cached"
            assert cached >= (len(prompt) - 1) // BLOCK * BLOCK if warm else cached == 0
    together = Served(model, backend)
    for warm in (False, True):
        found_of_each, cached_of_each = together.ask(PROMPTS)
        assert found_of_each == answers, f"all together, {cached_of_each} cached"
        for prompt, cached in zip(PROMPTS, cached_of_each, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK * BLOCK if warm else cached == 0
