"""The pool's state table, exactly, and against a naive model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memmgr.core.blocks import BlockPool, BlockState

FREE, LIVE, CACHED = BlockState.FREE, BlockState.LIVE, BlockState.CACHED


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(3)
    assert (pool.free, pool.live, pool.cached, pool.shared, pool.available) == (3, 0, 0, 0, 3)
    assert [pool.state(block) for block in range(3)] == [FREE, FREE, FREE]
    assert list(pool.eviction_order()) == []
    assert pool.check_invariants() > 0


def test_blocks_are_given_out_last_freed_first_then_lowest() -> None:
    pool = BlockPool(4)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 2]
    for block in (0, 2):
        assert pool.drop(block)
        pool.release(block, 0.0)
    assert [pool.take(), pool.take(), pool.take()] == [2, 0, 3]
    assert pool.free == 0
    with pytest.raises(AssertionError, match="no free block"):
        pool.take()


def test_the_state_table() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert (pool.state(block), pool.references[block], pool.generations[block]) == (LIVE, 1, 1)
    pool.share(block)
    assert (pool.state(block), pool.references[block], pool.shared, pool.live) == (LIVE, 2, 1, 1)
    assert pool.drop(block) is False
    assert (pool.state(block), pool.references[block], pool.shared, pool.live) == (LIVE, 1, 0, 1)
    assert pool.drop(block) is True
    pool.keep(block, 7.5)
    assert (pool.state(block), pool.stamp(block), pool.live, pool.cached, pool.free) == (CACHED, 7.5, 0, 1, 1)
    assert (pool.available, pool.oldest()) == (2, block)
    pool.share(block)  # its content is used again: no new generation
    assert (pool.state(block), pool.references[block], pool.generations[block], pool.cached) == (LIVE, 1, 1, 0)
    assert pool.drop(block)
    pool.keep(block, 8.0)
    pool.release(block, 9.0)  # evicted
    assert (pool.state(block), pool.stamp(block), pool.cached, pool.free) == (FREE, 9.0, 0, 2)
    assert pool.take() == block
    assert pool.generations[block] == 2
    pool.check_invariants()


def test_what_may_not_be_done() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="no reference to drop"):
        pool.drop(0)
    with pytest.raises(AssertionError, match="not cached"):
        pool.share(0)  # a free block holds nothing to share
    with pytest.raises(AssertionError, match="no cached block"):
        pool.oldest()
    block = pool.take()
    with pytest.raises(AssertionError):
        pool.keep(block, 0.0)
    with pytest.raises(AssertionError):
        pool.release(block, 0.0)


def test_the_eviction_order_is_that_of_keeping() -> None:
    pool = BlockPool(5)
    for _ in range(5):
        pool.take()
    for block in (3, 1, 4, 0):
        pool.drop(block)
        pool.keep(block, 0.0)
    assert list(pool.eviction_order()) == [3, 1, 4, 0]
    pool.share(1)
    pool.release(3, 0.0)
    assert list(pool.eviction_order()) == [4, 0]
    pool.drop(1)
    pool.keep(1, 0.0)
    assert list(pool.eviction_order()) == [4, 0, 1]
    pool.check_invariants()


@pytest.mark.parametrize("field", ["live", "cached", "shared"])
def test_invariants_see_a_wrong_count(field: str) -> None:
    pool = BlockPool(3)
    pool.take()
    setattr(pool, field, getattr(pool, field) + 1)
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_invariants_see_a_lost_reference() -> None:
    pool = BlockPool(3)
    pool.take()
    pool.references[0] = 0
    with pytest.raises(AssertionError):
        pool.check_invariants()


OPERATIONS = st.sampled_from(["take", "share", "drop-keep", "drop-free", "evict"])


@given(st.integers(1, 6), st.lists(st.tuples(OPERATIONS, st.integers(0, 5))))
def test_any_sequence_of_legal_operations_agrees_with_a_naive_model(total: int, operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(total)
    references = dict.fromkeys(range(total), 0)
    order: list[int] = []
    for now, (operation, number) in enumerate(operations):
        block = number % total
        if operation == "take" and pool.free:
            taken = pool.take()
            assert references[taken] == 0
            assert taken not in order
            references[taken] = 1
        elif operation == "share" and (references[block] or block in order):
            pool.share(block)
            references[block] += 1
            if block in order:
                order.remove(block)
        elif operation.startswith("drop") and references[block]:
            references[block] -= 1
            assert pool.drop(block) is (references[block] == 0)
            if references[block] == 0:
                if operation == "drop-keep":
                    pool.keep(block, float(now))
                    order.append(block)
                else:
                    pool.release(block, float(now))
        elif operation == "evict" and order:
            assert pool.oldest() == order[0]
            pool.release(order.pop(0), float(now))
        assert list(pool.references) == list(references.values())
        assert list(pool.eviction_order()) == order
        assert pool.free + pool.live + pool.cached == pool.total
        pool.check_invariants()


MANY = st.sampled_from(["take", "share", "drop", "pin", "unpin", "evict"])


@given(
    st.integers(1, 8),
    st.sets(st.integers(0, 7)),
    st.lists(st.tuples(MANY, st.lists(st.integers(0, 7), max_size=8, unique=True), st.booleans()), max_size=30),
)
def test_many_at_once_become_what_they_do_one_by_one(
    total: int, useless: set[int], operations: list[tuple[str, list[int], bool]]
) -> None:
    many, single = BlockPool(total), BlockPool(total)
    of_use = [None if block in useless else b"content" for block in range(total)]
    now = 0.0
    for operation, numbers, later in operations:
        now += later
        chosen = [number for number in numbers if number < total]
        live = [block for block in chosen if many.references[block]]
        if operation == "take":
            count = min(len(chosen), many.free)
            assert many.take_some(count) == [single.take() for _ in range(count)]
        elif operation == "share":
            shared = [block for block in chosen if many.state(block) is not FREE]
            many.share_all(shared)
            for block in shared:
                single.share(block)
        elif operation == "drop":
            live = [block for block in live if not (block in useless and many.pins[block])]
            gone = many.drop_all(live, of_use, now)
            dropped = [block for block in live if single.drop(block)]
            assert gone == [block for block in dropped if of_use[block] is None]
            for block in gone:
                many.release(block, now)
            for block in dropped:
                if of_use[block] is None:
                    single.release(block, now)
                else:
                    single.keep(block, now)
        elif operation == "evict" and many.evictable_among(range(total)) and not many.free:
            victims = many.oldest_some(len(chosen) + 1)
            many.reuse(victims)
            for block in victims:
                assert single.oldest() == block
                single.release(block, now)
                assert single.take() == block
        else:
            for block in chosen:
                for pool in (many, single):
                    if operation == "pin" and pool.state(block) is not FREE:
                        pool.pin(block)
                    elif operation == "unpin" and pool.pins[block]:
                        pool.unpin(block)
        for pool in (many, single):
            pool.check_invariants()
        assert list(many.eviction_order()) == list(single.eviction_order())
        assert [many.state(block) for block in range(total)] == [single.state(block) for block in range(total)]
        assert (many.references, many.generations, many.shared) == (single.references, single.generations, single.shared)
        idle = [block for block in range(total) if not many.references[block]]
        assert [many.stamp(block) for block in idle] == [single.stamp(block) for block in idle]


def test_what_left_a_run_is_forgotten_in_time() -> None:
    """A prefix that is used again and again leaves no more entries behind than there are cached blocks."""
    pool = BlockPool(8)
    blocks = pool.take_some(8)
    assert pool.drop_all(blocks, [b"content"] * 8, 0.0) == []
    for now in range(100):
        pool.share_all(blocks[:3])
        assert pool.drop_all(blocks[:3], [b"content"] * 8, float(now)) == []
        pool.check_invariants()
    assert list(pool.eviction_order()) == [*blocks[3:], *blocks[:3]]
    assert pool.release_all(100.0) == [*blocks[3:], *blocks[:3]]
    assert (pool.free, pool.cached) == (8, 0)
    pool.check_invariants()


def cached(pool: BlockPool, count: int, now: float, *, favoured: bool = False) -> list[int]:
    """Make free blocks cached ones, at once, the last of a chain first."""
    blocks = pool.take_some(count)
    if favoured:
        pool.favour(blocks)
    assert pool.drop_all(blocks[::-1], [b"name"] * pool.total, now) == []
    pool.check_invariants()
    return blocks


def test_what_has_proven_its_use_goes_last() -> None:
    pool = BlockPool(8, proven=4)
    proven = cached(pool, 2, 1.0, favoured=True)
    once = cached(pool, 3, 2.0)
    assert list(pool.eviction_order()) == [*once[::-1], *proven[::-1]]
    assert pool.oldest_some(8) == once[::-1]


def test_what_is_favoured_beyond_its_part_of_the_pool_waits_its_turn_again() -> None:
    pool = BlockPool(8, proven=3)
    first = cached(pool, 2, 1.0, favoured=True)
    once = cached(pool, 1, 2.0)
    second = cached(pool, 2, 3.0, favoured=True)
    assert list(pool.eviction_order()) == [*once, *first[::-1], *second[::-1]]
    third = cached(pool, 2, 4.0, favoured=True)
    assert list(pool.eviction_order()) == [*once, *first[::-1], *second[::-1], *third[::-1]]
    assert pool.oldest_some(8) == once


def test_a_chain_whose_head_has_proven_its_use_is_parted() -> None:
    pool = BlockPool(8, proven=4)
    chain = pool.take_some(4)
    pool.favour(chain[:2])
    pool.drop_all(chain[::-1], [b"name"] * 8, 1.0)
    pool.check_invariants()
    other = cached(pool, 2, 2.0)
    assert list(pool.eviction_order()) == [chain[3], chain[2], *other[::-1], chain[1], chain[0]]


def test_what_is_given_out_again_has_to_prove_its_use_again() -> None:
    pool = BlockPool(2, proven=2)
    blocks = cached(pool, 2, 1.0, favoured=True)
    pool.reuse(pool.oldest_some(2))
    assert pool.drop_all([0], [b"name"] * 2, 2.0) == []
    pool.release(0, 2.0)
    again = cached(pool, 1, 3.0)
    assert pool.drop_all([1], [b"name"] * 2, 4.0) == []
    assert list(pool.eviction_order()) == [*again, 1]
    assert sorted(blocks) == [0, 1]


def test_what_was_moved_on_has_to_prove_its_use_again() -> None:
    pool = BlockPool(8, proven=2)
    moved = cached(pool, 3, 1.0, favoured=True)
    assert list(pool.eviction_order()) == moved[::-1]
    assert pool.share(moved[2])
    assert pool.drop_all(moved[2:], [b"name"] * 8, 2.0) == []
    other = cached(pool, 1, 3.0)
    assert list(pool.eviction_order()) == [moved[2], *other, moved[1], moved[0]]


def test_a_long_table_moves_on_only_what_is_beyond_the_part_of_the_pool() -> None:
    pool = BlockPool(16, proven=4)
    short = cached(pool, 2, 1.0, favoured=True)
    long = cached(pool, 5, 2.0, favoured=True)
    once = cached(pool, 1, 3.0)
    assert list(pool.eviction_order()) == [*short[::-1], long[4], *once, *long[3::-1]]


def test_what_an_admission_shares_has_proven_its_use() -> None:
    pool = BlockPool(8, proven=4)
    whole, parted = cached(pool, 2, 1.0), cached(pool, 2, 2.0)
    assert pool.share_all(whole, favour=True) == 2
    assert pool.share(parted[0])
    assert pool.share_all(parted, favour=True) == 1
    assert pool.drop_all(whole[::-1], [b"name"] * 8, 3.0) == []
    assert pool.drop_all(parted[::-1], [b"name"] * 8, 4.0) == []
    assert pool.drop_all(parted[:1], [b"name"] * 8, 4.0) == []
    other = cached(pool, 2, 5.0)
    assert list(pool.eviction_order()) == [*other[::-1], *whole[::-1], parted[1], parted[0]]
