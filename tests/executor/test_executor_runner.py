"""Steps made by hand, through every part of the executor, against transformers' own generation in float32."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from executor.batch import Limits, Slots
from executor.errors import PlanError
from executor.loader import LoadedModel, load
from executor.pool import HEADER_VERSION, PoolSpec, device_pool
from executor.progress import Progress
from executor.runner import Runner
from kernels.registry import create
from kilburn.v1.engine_pb2 import Chunk, PoolHeader, SamplingParams, SlotOpen, StepResult
from kilburn.v1.inference_pb2 import TokenLogprob
from tests.executor.executor_help import VOCAB, Tables, greedy, plan, sampling, save_tiny

CPU = torch.device("cpu")
PROMPTS = ([5, 17, 3, 88, 42, 9, 61, 2, 2, 70, 31, 8, 19], [1], [96, 4, 50, 23, 77, 12, 6], list(range(40, 75)))
OUTPUTS = 12


@dataclass
class Rig:
    """A runner over a poisoned pool, and the plans that a careless memmgr would make for it."""

    model: LoadedModel
    num_blocks: int = 200
    host_blocks: int = 0
    progress: Progress = field(default_factory=Progress)
    step: int = 0
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))  # of each slot, from `generate`

    def __post_init__(self) -> None:
        backend = create("reference")
        layout = backend.layout(self.model.shape)
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
            backend=backend,
            pool=self.pool,
            slots=self.slots,
            progress=self.progress,
            clock_ns=lambda: next(ticks),
            poison=True,
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


Load = Callable[[Path, int], LoadedModel]


def load_here(folder: Path, block_size: int) -> LoadedModel:
    return load(folder, device=CPU, dtype="float32", backend=create("reference"), block_size=block_size, max_model_len=None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_here(save_tiny(tmp_path_factory.mktemp("llama")), 4)


FAMILIES: list[tuple[str, dict[str, object]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
    ("Mistral", {"sliding_window": 6}),
    ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    ("GPT2", {"num_key_value_heads": 4, "n_positions": 128}),
    ("StableLm", {}),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("Phi3", {}),
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


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_tokens_are_those_of_transformers(family: str, options: dict[str, object], tmp_path: Path) -> None:
    """Chunks and decodes mixed, tables in no order, blocks of three sizes, everything unwritten being NaN."""
    folder = save_tiny(tmp_path, family, options)
    expected = [greedy(folder, prompt, OUTPUTS) for prompt in PROMPTS]
    for block_size, chunk in ((1, 4), (7, 5), (16, 40)):
        rig = Rig(load_here(folder, block_size))
        assert rig.generate(PROMPTS, OUTPUTS, chunk, [sampling()] * len(PROMPTS)) == expected


def test_a_sequence_that_waited_on_the_host_goes_on_as_if_it_had_not(llama: LoadedModel, tmp_path: Path) -> None:
    """Out in one plan, its blocks poisoned; back into other blocks in another, and a clone made of one in the same plan."""
    expected = greedy(save_tiny(tmp_path), PROMPTS[0], 2)
    rig = Rig(llama, host_blocks=8)
    prompt = PROMPTS[0]
    first = rig.run(
        opens=[SlotOpen(slot=0, sampling=sampling())],
        chunks=[Chunk(slot=0, token_ids=prompt, new_blocks=[10, 11, 12, 13])],
        samples=[(0, 0, 0)],
    )
    assert list(first.token_ids) == expected[:1]
    rig.run(outs=[(10, 3), (11, 2), (12, 1), (13, 0)], freed=[10, 11, 12, 13], closes=[0])
    second = rig.run(
        ins=[(3, 20), (2, 21), (1, 22), (0, 23)],
        copies=[(23, 24)],
        opens=[SlotOpen(slot=5, sampling=sampling())],
        chunks=[Chunk(slot=5, start=13, token_ids=expected[:1], new_blocks=[20, 21, 22, 24])],
        samples=[(0, 5, 1)],
    )
    assert list(second.token_ids) == expected[1:]


WINDOWS: list[tuple[str, dict[str, object]]] = [
    ("Mistral", {"sliding_window": 32}),
    ("Mistral", {"sliding_window": None}),
    ("Gemma2", {"head_dim": 8, "sliding_window": 32}),
    ("Qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}),
]


@pytest.mark.parametrize(("family", "options"), WINDOWS, ids=["all", "none", "every other", "the last"])
def test_prompts_around_the_edge_of_a_window(family: str, options: dict[str, object], tmp_path: Path) -> None:
    """In one chunk and in several, then once more on top of the first blocks of the same prompt."""
    folder = save_tiny(tmp_path, family, options)
    prompts = [[(length * 7 + at * at * 5) % VOCAB for at in range(length)] for length in (20, 32, 33, 100)]
    expected = [greedy(folder, prompt, OUTPUTS) for prompt in prompts]
    for chunk in (200, 9):
        rig = Rig(load_here(folder, 8))
        assert rig.generate(prompts, OUTPUTS, chunk, [sampling()] * 4) == expected
        for slot, (prompt, answer) in enumerate(zip(prompts, expected, strict=True), start=8):
            shared = (len(prompt) - 1) // 8
            rig.tables.owned[slot] = rig.tables.owned[slot - 8][:shared]
            blocks = [*rig.tables.owned[slot], *rig.tables.grow(slot, len(prompt))]
            rest = Chunk(slot=slot, start=8 * shared, token_ids=prompt[8 * shared :], new_blocks=blocks)
            found = rig.run(opens=[SlotOpen(slot=slot, sampling=sampling())], chunks=[rest], samples=[(0, slot, 0)])
            assert list(found.token_ids) == answer[:1]


HEADS = [(6, 1), (7, 1), (12, 2), (14, 2), (15, 5), (24, 8)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_log_probabilities_stay_those_of_transformers_over_the_edges_of_blocks(heads: int, kv_heads: int, tmp_path: Path) -> None:
    """Prompts that end before, at and after the edge of a block, then decodes over three more edges; odd numbers of heads."""
    import transformers

    options = {"hidden_size": 4 * heads, "head_dim": 4, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    folder = save_tiny(tmp_path, options=options)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=1.0, top_p=1.0, seed=heads, with_logprobs=True, top_logprobs=3)
    for block_size in (4, 5):
        prompts = [[(seed * 31 + at * at) % VOCAB for at in range(2 * block_size + seed)] for seed in (-1, 0, 1)]
        rig = Rig(load_here(folder, block_size))
        outputs = rig.generate(prompts, 3 * block_size + 2, 99, [params] * len(prompts))
        for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1)
            for row, found in zip(expected, rig.logprobs[slot], strict=True):
                assert found.logprob == pytest.approx(float(row[found.token_id]), abs=1e-4)
                assert [top.logprob for top in found.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
                assert sum(math.exp(top.logprob) for top in found.top) <= 1 + 1e-5


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(llama: LoadedModel) -> None:
    params = [sampling(temperature=1.0, seed=seed + 2**40) for seed in range(len(PROMPTS))]
    together = Rig(llama).generate(PROMPTS, 20, 3, params)
    for prompt, one, expected in zip(PROMPTS, params, together, strict=True):
        assert Rig(llama).generate([prompt], 20, 11, [one]) == [expected]


def test_a_preempted_sequence_goes_on_with_the_same_tokens(llama: LoadedModel) -> None:
    """Closed, its blocks poisoned, opened in another slot, its prompt and first outputs computed again."""
    prompt, params = PROMPTS[0], sampling(temperature=0.8, top_k=40, seed=3)
    expected = Rig(llama).generate([prompt], 10, 99, [params])[0]
    rig = Rig(llama)
    first = rig.generate([prompt], 4, 99, [params])[0]
    known = [*prompt, *first]
    chunk = Chunk(slot=9, token_ids=known, new_blocks=rig.tables.grow(9, len(known)))
    result = rig.run(
        closes=[0],
        freed=rig.tables.owned[0],
        opens=[SlotOpen(slot=9, sampling=params)],
        chunks=[chunk],
        samples=[(0, 9, len(first))],
    )
    tokens = [*first, result.token_ids[0]]
    while len(tokens) < 10:
        start = len(prompt) + len(tokens) - 1
        more = Chunk(slot=9, start=start, new_blocks=rig.tables.grow(9, start + 1))
        tokens += rig.run(chunks=[more], samples=[(0, 9, len(tokens))]).token_ids
    assert tokens == expected


def test_a_cached_prefix_is_shared_and_a_copy_is_a_clone(llama: LoadedModel) -> None:
    """Two sequences read one prefix; one goes on in a copied block, as copy-on-write has it, and the other is not disturbed."""
    prompt = PROMPTS[3][:10]  # two and a half blocks of four
    rig = Rig(llama)
    expected = rig.generate([prompt], 6, 99, [sampling()])[0]
    table = rig.tables.owned[0]
    result = rig.run(
        opens=[SlotOpen(slot=1, sampling=sampling())],
        copies=[(table[2], 150)],
        chunks=[Chunk(slot=1, start=8, token_ids=prompt[8:10], new_blocks=[table[0], table[1], 150])],
        samples=[(0, 1, 0)],
    )
    tokens = list(result.token_ids)
    for position in range(1, 6):
        blocks = [160 + position] if (9 + position) % 4 == 0 else []
        more = Chunk(slot=1, start=9 + position, new_blocks=blocks)
        tokens += rig.run(chunks=[more], samples=[(0, 1, position)]).token_ids
    assert tokens == expected


def test_samples_of_one_row_draw_by_their_index(llama: LoadedModel) -> None:
    rig = Rig(llama)
    opens = [SlotOpen(slot=slot, sampling=sampling(temperature=5.0, seed=1), index=slot) for slot in range(12)]
    chunk = Chunk(slot=0, token_ids=[1, 2, 3], new_blocks=[0])
    result = rig.run(opens=opens, chunks=[chunk], samples=[(0, slot, 0) for slot in range(12)])
    assert len(set(result.token_ids)) > 6
    again = Rig(llama).run(opens=opens[5:6], chunks=[Chunk(slot=5, token_ids=[1, 2, 3], new_blocks=[7])], samples=[(0, 5, 0)])
    assert again.token_ids[0] == result.token_ids[5]


def test_a_sequence_of_nan_fails_alone(llama: LoadedModel) -> None:
    """Its first block is poisoned under it."""
    rig = Rig(llama)
    tokens = rig.generate(PROMPTS[:2], 3, 99, [sampling()] * 2)
    chunks = [
        Chunk(slot=slot, start=len(PROMPTS[slot]) + 2, new_blocks=rig.tables.grow(slot, len(PROMPTS[slot]) + 3))
        for slot in range(2)
    ]
    result = rig.run(freed=rig.tables.owned[0][:1], chunks=chunks, samples=[(0, 0, 3), (1, 1, 3)])
    assert list(result.failed) == [0]
    assert [*tokens[1], result.token_ids[1]] == Rig(llama).generate([PROMPTS[1]], 4, 9, [sampling()])[0]
    # The plan behind it was already out; what it computes is of no use, and harms nobody.
    late = Chunk(slot=0, start=len(PROMPTS[0]) + 3, new_blocks=rig.tables.grow(0, len(PROMPTS[0]) + 4))
    assert list(rig.run(chunks=[late], samples=[(0, 0, 4)]).failed) == [0]


def test_log_probabilities_are_of_the_raw_distribution(llama: LoadedModel) -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=4, with_logprobs=True, top_logprobs=3)
    rig = Rig(llama)
    chunk = Chunk(slot=0, token_ids=PROMPTS[0], new_blocks=rig.tables.grow(0, len(PROMPTS[0])))
    result = rig.run(opens=[SlotOpen(slot=0, sampling=params)], chunks=[chunk], samples=[(0, 0, 0)])
    (found,) = result.logprobs
    llama.model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = torch.log_softmax(llama.model(torch.tensor([PROMPTS[0]])).logits[0, -1], -1)
    llama.model.set_attn_implementation("kilburn")
    assert found.sample == 0
    assert found.logprob.token_id == result.token_ids[0]
    assert found.logprob.logprob == pytest.approx(float(expected[result.token_ids[0]]), abs=1e-4)
    assert [top.token_id for top in found.logprob.top] == expected.topk(3).indices.tolist()
    assert found.logprob.rank == int((expected > expected[result.token_ids[0]]).sum()) + 1


def test_freed_blocks_are_poisoned_before_the_copies(llama: LoadedModel) -> None:
    rig = Rig(llama)
    rig.pool.frames.zero_()
    rig.run(freed=[3, 4], copies=[(5, 4)])
    assert rig.pool.frames.isnan().all(dim=1).nonzero().flatten().tolist() == [3]


def test_times_and_progress(llama: LoadedModel) -> None:
    rig = Rig(llama)
    result = rig.run(opens=[SlotOpen(slot=0, sampling=sampling())], chunks=[Chunk(slot=0, token_ids=[1], new_blocks=[0])])
    assert (result.times.prepare, result.times.forward, result.times.sample) == (1000, 1000, 1000)
    assert (rig.progress.step, rig.progress.layer) == (1, 3)
    assert rig.run(closes=[0]).times.prepare == 1000


def test_steps_have_no_gaps(llama: LoadedModel) -> None:
    rig = Rig(llama)
    rig.run()
    for step in (1, 3):
        with pytest.raises(PlanError, match=f"step {step} comes after step 1"):
            rig.runner.run(plan(step))


def test_a_new_memmgr_begins_with_nothing(llama: LoadedModel) -> None:
    rig = Rig(llama)
    rig.generate(PROMPTS[:2], 2, 9, [sampling()] * 2)
    rig.runner.reset()
    assert list(rig.runner.inspect(1).slots) == []
    rig.runner.run(plan(1, opens=[SlotOpen(slot=0, sampling=sampling())]))


def test_an_inspection_tells_tables_and_lengths(llama: LoadedModel) -> None:
    rig = Rig(llama)
    rig.generate([PROMPTS[0]], 2, 9, [sampling()])
    inspection = rig.runner.inspect(77)
    assert inspection.id == 77
    assert [(slot.slot, slot.length, list(slot.table)) for slot in inspection.slots] == [
        (0, len(PROMPTS[0]) + 1, rig.tables.owned[0])
    ]
    assert list(inspection.faults) == []
    assert inspection.checks > 0


def test_an_inspection_too_long_to_send_says_so(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor import runner

    monkeypatch.setattr(runner, "MAX_INSPECTED_ENTRIES", 3)
    rig = Rig(llama)
    rig.generate([PROMPTS[0]], 1, 9, [sampling()])
    inspection = rig.runner.inspect(1)
    assert list(inspection.slots) == []
    assert list(inspection.faults) == ["4 table entries are too many to list; at most 3"]


def test_the_vocabularys_last_id_can_be_computed(llama: LoadedModel) -> None:
    rig = Rig(llama)
    chunk = Chunk(slot=0, token_ids=[VOCAB - 1], new_blocks=[0])
    assert len(rig.run(opens=[SlotOpen(slot=0, sampling=sampling())], chunks=[chunk], samples=[(0, 0, 0)]).token_ids) == 1
