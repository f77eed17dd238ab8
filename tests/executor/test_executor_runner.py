"""Steps made by hand, through every part of the executor: who waited, shares, was preempted or is NaN, by each way to attend."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.errors import PlanError
from executor.loader import LoadedModel
from kernels.interface import AttentionBackend
from kilburn.v1.engine_pb2 import Chunk, SamplingParams, SlotOpen
from tests.executor.executor_help import VOCAB, greedy, plan, sampling, save_tiny
from tests.executor.rig import PROMPTS, Rig, load_here


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_here(save_tiny(tmp_path_factory.mktemp("llama")), 4)


def test_a_sequence_that_waited_on_the_host_goes_on_as_if_it_had_not(
    llama: LoadedModel, backend: AttentionBackend[Any], tmp_path: Path
) -> None:
    """Out in one plan, its blocks poisoned; back into other blocks in another, and a clone made of one in the same plan."""
    expected = greedy(save_tiny(tmp_path), PROMPTS[0], 2)
    rig = Rig(llama, backend, host_blocks=8)
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


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(llama: LoadedModel, backend: AttentionBackend[Any]) -> None:
    params = [sampling(temperature=1.0, seed=seed + 2**40) for seed in range(len(PROMPTS))]
    together = Rig(llama, backend).generate(PROMPTS, 20, 3, params)
    for prompt, one, expected in zip(PROMPTS, params, together, strict=True):
        assert Rig(llama, backend).generate([prompt], 20, 11, [one]) == [expected]


def test_a_preempted_sequence_goes_on_with_the_same_tokens(llama: LoadedModel, backend: AttentionBackend[Any]) -> None:
    """Closed, its blocks poisoned, opened in another slot, its prompt and first outputs computed again."""
    prompt, params = PROMPTS[0], sampling(temperature=0.8, top_k=40, seed=3)
    expected = Rig(llama, backend).generate([prompt], 10, 99, [params])[0]
    rig = Rig(llama, backend)
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


def test_a_cached_prefix_is_shared_and_a_copy_is_a_clone(llama: LoadedModel, backend: AttentionBackend[Any]) -> None:
    """Two sequences read one prefix; one goes on in a copied block, as copy-on-write has it, and the other is not disturbed."""
    prompt = PROMPTS[3][:10]  # two and a half blocks of four
    rig = Rig(llama, backend)
    expected = rig.generate([prompt], 6, 99, [sampling()])[0]
    table = rig.tables.owned[0]
    result = rig.run(
        opens=[SlotOpen(slot=1, sampling=sampling())],
        copies=[(table[2], 150)],
        chunks=[
            Chunk(slot=1, start=9, token_ids=prompt[9:10], new_blocks=[table[0], table[1], 150])
        ],  # its ninth token is copied
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


def test_a_sequence_of_nan_fails_alone(llama: LoadedModel, backend: AttentionBackend[Any]) -> None:
    """Its first block is poisoned under it."""
    rig = Rig(llama, backend)
    tokens = rig.generate(PROMPTS[:2], 3, 99, [sampling()] * 2)
    chunks = [
        Chunk(slot=slot, start=len(PROMPTS[slot]) + 2, new_blocks=rig.tables.grow(slot, len(PROMPTS[slot]) + 3))
        for slot in range(2)
    ]
    result = rig.run(freed=rig.tables.owned[0][:1], chunks=chunks, samples=[(0, 0, 3), (1, 1, 3)])
    assert list(result.failed) == [0]
    assert [*tokens[1], result.token_ids[1]] == Rig(llama, backend).generate([PROMPTS[1]], 4, 9, [sampling()])[0]
    # The plan behind it was already out; what it computes is of no use, and harms nobody.
    late = Chunk(slot=0, start=len(PROMPTS[0]) + 3, new_blocks=rig.tables.grow(0, len(PROMPTS[0]) + 4))
    assert list(rig.run(chunks=[late], samples=[(0, 0, 4)]).failed) == [0]


def test_log_probabilities_are_of_the_raw_distribution(llama: LoadedModel, backend: AttentionBackend[Any]) -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=4, with_logprobs=True, top_logprobs=3)
    rig = Rig(llama, backend)
    chunk = Chunk(slot=0, token_ids=PROMPTS[0], new_blocks=rig.tables.grow(0, len(PROMPTS[0])))
    result = rig.run(opens=[SlotOpen(slot=0, sampling=params)], chunks=[chunk], samples=[(0, 0, 0)])
    (found,) = result.logprobs
    assert llama.model is not None
    llama.model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = torch.log_softmax(llama.model(torch.tensor([PROMPTS[0]])).logits[0, -1], -1)
    llama.model.set_attn_implementation("kilburn")
    assert found.sample == 0
    assert found.logprob.token_id == result.token_ids[0]
    assert found.logprob.logprob == pytest.approx(float(expected[result.token_ids[0]]), abs=1e-4)
    assert [top.token_id for top in found.logprob.top] == expected.topk(3).indices.tolist()
    assert found.logprob.rank == int((expected > expected[result.token_ids[0]]).sum()) + 1


def test_freed_blocks_are_poisoned_before_the_copies(llama: LoadedModel, backend: AttentionBackend[Any]) -> None:
    rig = Rig(llama, backend)
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
