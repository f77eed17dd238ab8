"""Slots, and the arrays that a plan becomes; what breaks a rule is refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.batch import Limits, Slots
from executor.errors import PlanError
from kilburn.v1.engine_pb2 import Chunk, SamplingParams, SlotOpen, StepPlan, TableEdit
from tests.executor.executor_help import plan, sampling

LIMITS = Limits(num_blocks=20, block_size=4, context_length=30, vocab_size=100, max_slots=4, max_step_tokens=16, host_blocks=5)


def opened(*slots: int) -> list[SlotOpen]:
    return [SlotOpen(slot=slot, sampling=sampling(), index=slot + 10) for slot in slots]


def started() -> Slots:
    """Slot 1 with 6 tokens in blocks 5 and 7; it has sampled token 42."""
    slots = Slots(LIMITS)
    batch = slots.apply(
        plan(1, opens=opened(1), chunks=[Chunk(slot=1, token_ids=range(6), new_blocks=[5, 7])], samples=[(0, 1, 0)])
    )
    assert batch is not None
    slots.sampled(batch.sample_slots, [42])
    return slots


def test_decodes_come_first_and_samples_find_their_rows() -> None:
    slots = started()
    batch = slots.apply(
        plan(
            2,
            opens=opened(0, 3, 2),
            chunks=[
                Chunk(slot=3, token_ids=[9, 8, 7], new_blocks=[0]),
                Chunk(slot=1, start=6),
                Chunk(slot=0, start=4, token_ids=[1, 2], new_blocks=[3, 4]),  # behind a cached prefix
            ],
            samples=[(0, 3, 0), (1, 1, 1), (2, 0, 0), (2, 2, 0)],  # two samples of one row
        )
    )
    assert batch is not None
    assert batch.decodes == 1
    assert batch.query_lengths == (1, 3, 2)
    assert batch.context_lengths == (7, 3, 6)
    assert batch.token_ids.tolist() == [42, 9, 8, 7, 1, 2]
    assert batch.positions.tolist() == [6, 0, 1, 2, 4, 5]
    assert batch.tables.tolist() == [[5, 7], [0, 20], [3, 4]]  # padded with the scratch block
    assert batch.write_slots.tolist() == [30, 0, 1, 2, 16, 17]
    assert batch.logit_rows[batch.sample_logits].tolist() == [3, 0, 5, 5]
    assert batch.logit_rows.tolist() == [0, 3, 5]
    assert batch.sample_slots == (3, 1, 0, 2)
    assert [(draw.index, draw.position) for draw in batch.draws] == [(13, 0), (11, 1), (10, 0), (12, 0)]


def test_a_chunk_without_samples() -> None:
    batch = Slots(LIMITS).apply(plan(1, opens=opened(0), chunks=[Chunk(slot=0, token_ids=[1, 2], new_blocks=[0])]))
    assert batch is not None
    assert len(batch.logit_rows) == 0
    assert batch.draws == ()


def test_a_plan_without_chunks_has_no_batch() -> None:
    slots = started()
    assert slots.apply(plan(2, closes=[1], opens=opened(1, 2))) is None
    assert [(state.slot, state.length, list(state.table)) for state in slots.state()] == [(1, 0, []), (2, 0, [])]


def test_edits_replace_entries() -> None:
    slots = started()
    chunk = Chunk(slot=1, start=6, token_ids=[3], edits=[TableEdit(logical=1, block=9)])
    batch = slots.apply(plan(2, chunks=[chunk]))
    assert batch is not None
    assert batch.tables.tolist() == [[5, 9]]
    assert batch.write_slots.tolist() == [9 * 4 + 2]


def test_tableswiden() -> None:
    limits = Limits(num_blocks=200, block_size=1, context_length=200, vocab_size=10, max_slots=2, max_step_tokens=200)
    slots = Slots(limits)
    slots.apply(plan(1, opens=opened(0, 1), chunks=[Chunk(slot=1, token_ids=[1], new_blocks=[199])]))
    slots.apply(plan(2, chunks=[Chunk(slot=0, token_ids=[1] * 150, new_blocks=range(150))]))
    assert [list(state.table) for state in slots.state()] == [list(range(150)), [199]]
    assert slots.entries() == 151


def test_clear_closes_everything() -> None:
    slots = started()
    slots.clear()
    assert len(slots) == 0
    assert slots.state() == []
    assert slots.faults() == ([], 0)


ONE = Chunk(slot=1, start=6)

BROKEN: list[tuple[StepPlan, str]] = [
    (plan(2, closes=[0]), "slot 0 is closed, but it is not open"),
    (plan(2, closes=[9]), "slot 9 is closed"),
    (plan(2, opens=opened(1)), "slot 1 is opened, but it is open"),
    (plan(2, opens=opened(4)), "slot 4 is opened; there are 4"),
    (plan(2, chunks=[Chunk(slot=0, token_ids=[1], new_blocks=[1])]), "slot 0, which is not open"),
    (plan(2, chunks=[Chunk(slot=4_000_000_000, token_ids=[1])]), "which is not open"),
    (plan(2, chunks=[Chunk(slot=1, start=5)]), "holds 6 tokens, and its chunk starts at 5"),
    (plan(2, chunks=[Chunk(slot=1, start=7)]), "holds 6 tokens, and its chunk starts at 7"),
    (plan(2, chunks=[Chunk(slot=1, start=6, token_ids=[100])]), "token 100; the vocabulary has 100"),
    (plan(2, chunks=[Chunk(slot=1, start=6, token_ids=[1, 2, 3])]), "would reach 9 tokens in 2 blocks"),
    (plan(2, chunks=[Chunk(slot=1, start=6, token_ids=[1], new_blocks=[20])]), "block 20; the pool has 20"),
    (plan(2, chunks=[Chunk(slot=1, start=6, token_ids=[1], new_blocks=[1] * 19)]), "would have 21 blocks"),
    (plan(2, chunks=[Chunk(slot=1, start=6, token_ids=[1], edits=[TableEdit(logical=2, block=1)])]), "entry 2 of slot 1"),
    (plan(2, chunks=[Chunk(slot=1, start=6, token_ids=[1], edits=[TableEdit(logical=0, block=20)])]), "block 20"),
    (
        plan(2, opens=opened(0), chunks=[Chunk(slot=0, start=29, token_ids=[1, 2], new_blocks=range(8))]),
        "reach 31 tokens",
    ),
    (plan(2, opens=opened(0), chunks=[Chunk(slot=0, new_blocks=[1])]), "slot 0 has sampled nothing"),
    (plan(2, chunks=[ONE, ONE]), "a slot has two chunks"),
    (plan(2, opens=opened(0), chunks=[Chunk(slot=0, token_ids=range(17), new_blocks=range(5))]), "a plan of 17 rows; at most 16"),
    (plan(2, opens=opened(0), chunks=[ONE, Chunk(slot=0, start=2, token_ids=[1], new_blocks=[7])]), "two rows write the same"),
    (plan(2, chunks=[ONE], samples=[(1, 1, 0)]), "a sample names chunk 1; the plan has 1"),
    (plan(2, samples=[(0, 1, 0)]), "a sample names chunk 0; the plan has 0"),
    (plan(2, chunks=[ONE], samples=[(0, 0, 0)]), "a sample names slot 0, which is not open"),
    (plan(2, chunks=[ONE], samples=[(0, 1, 0), (0, 1, 1)]), "a slot is sampled twice"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_plan_that_breaks_a_rule_is_refused(broken: StepPlan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        started().apply(broken)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (plan(2, freed=[20]), "block 20; the pool has 20"),
        (plan(2, copies=[(20, 1)]), "block 20"),
        (plan(2, copies=[(1, 20)]), "block 20"),
        (plan(2, copies=[(1, 2), (3, 2)]), "copied to twice"),
        (plan(2, copies=[(1, 2), (2, 3)]), "both source and destination"),
        (plan(2, copies=[(1, 1)]), "both source and destination"),
        (plan(2, outs=[(20, 1)]), "block 20; the pool has 20"),
        (plan(2, outs=[(1, 5)]), "host block 5; there are 5"),
        (plan(2, ins=[(5, 1)]), "host block 5"),
        (plan(2, ins=[(1, 20)]), "block 20"),
        (plan(2, outs=[(1, 2)], ins=[(2, 3)]), "a host block is named twice"),
        (plan(2, outs=[(1, 2), (3, 2)]), "a host block is named twice"),
        (plan(2, ins=[(1, 2), (3, 2)]), "a block is swapped in twice"),
    ],
)
def test_blocks_outside_of_the_rules_are_refused(broken: StepPlan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        started().check_blocks(broken)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-0.1, top_p=1),
        SamplingParams(temperature=math.nan, top_p=1),
        SamplingParams(temperature=math.inf, top_p=1),
        SamplingParams(top_p=0),
        SamplingParams(top_p=1.5),
        SamplingParams(top_p=math.nan),
        SamplingParams(top_p=1, min_p=-0.1),
        SamplingParams(top_p=1, min_p=math.nan),
        SamplingParams(top_p=1, top_logprobs=21),
    ],
)
def test_sampling_out_of_range_is_refused(params: SamplingParams) -> None:
    with pytest.raises(PlanError, match="sampling parameters out of range"):
        Slots(LIMITS).apply(plan(1, opens=[SlotOpen(slot=0, sampling=params)]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), min_size=1, max_size=40))
def test_slots_follow_a_plain_model(steps: list[tuple[int, int, bool]]) -> None:
    """Random chunks and closings, against dictionaries and lists."""
    limits = Limits(num_blocks=400, block_size=3, context_length=300, vocab_size=100, max_slots=4, max_step_tokens=16)
    slots, used = Slots(limits), 0
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for step, (slot, count, close) in enumerate(steps, start=1):
        closes = [slot] if close and slot in tables else []
        for closed in closes:
            del tables[closed], lengths[closed]
        opens = [] if slot in tables else opened(slot)
        table = tables.setdefault(slot, [])
        start = lengths.setdefault(slot, 0)
        fresh: list[int] = []
        while (len(table) + len(fresh)) * 3 < start + count:
            fresh.append(used)
            used += 1
        table += fresh
        lengths[slot] = start + count
        chunk = Chunk(slot=slot, start=start, token_ids=range(count), new_blocks=fresh)
        batch = slots.apply(plan(step, closes=closes, opens=opens, chunks=[chunk], samples=[(0, slot, 0)]))
        assert batch is not None
        positions = range(start, start + count)
        assert batch.positions.tolist() == list(positions)
        assert batch.write_slots.tolist() == [table[position // 3] * 3 + position % 3 for position in positions]
        assert batch.tables[0].tolist() == table[: -(-(start + count) // 3)]
        assert {state.slot: (state.length, list(state.table)) for state in slots.state()} == {
            open_slot: (lengths[open_slot], tables[open_slot]) for open_slot in tables
        }
        assert slots.faults()[0] == []
