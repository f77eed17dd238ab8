"""The prefix index: names, domains, nodes, tails, limits."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memmgr.core.lineage import HASH_BYTES, Lineage, block_hash, root_hash
from memmgr.core.prefix import MAX_CHILDREN_COMPARED, Match, Node, PrefixIndex

ROOT = root_hash("model", "tenant", "salt")


def ids(*tokens: int) -> array[int]:
    return array("I", tokens)


def chain(index: PrefixIndex, blocks: dict[int, tuple[int, ...]], root: bytes = ROOT) -> Node | None:
    """Insert block -> tokens, each after the one before it; return the last node."""
    name, node = root, None
    for block, tokens in blocks.items():
        piece = ids(*tokens).tobytes()
        name = block_hash(name, piece)
        node = index.insert(block, name, node, root, piece, "tenant")
    index.check_invariants()
    return node


def match(index: PrefixIndex, *tokens: int, root: bytes = ROOT) -> Match:
    """Match a prompt, its last token left to compute."""
    return index.match(Lineage(root, "tenant"), ids(*tokens), len(tokens) - 1)


# --------------------------------------------------------------------------------------------------------- names


NAMES = st.text("amts\0", max_size=3)  # the tags of the fields are letters too


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=2, max_size=8, unique=True))
def test_no_two_domains_have_one_root(domains: list[tuple[str, str, str]]) -> None:
    assert len({root_hash(*domain) for domain in domains}) == len(domains)


def test_fields_do_not_run_into_each_other() -> None:
    assert len({root_hash("ab", "c", ""), root_hash("a", "bc", ""), root_hash("a", "b", "c"), root_hash("", "ab", "c")}) == 4
    assert root_hash("a", "tb", "c") != root_hash("at", "b", "c"), "a field holds the tag of the next"
    assert len({block_hash(ROOT, b"\1\0\0\0"), block_hash(ROOT + b"\1\0\0\0", b""), block_hash(ROOT, b"")}) == 3
    assert len(block_hash(ROOT, b"")) == len(ROOT) == HASH_BYTES


def test_a_root_is_no_block() -> None:
    assert root_hash("", "", "") != block_hash(b"", b"")


def test_a_lineage_names_each_block_once() -> None:
    lineage = Lineage(ROOT, "tenant")
    first = lineage.name(0, b"aaaa")
    assert first == block_hash(ROOT, b"aaaa")
    assert lineage.name(1, b"bbbb") == block_hash(first, b"bbbb")
    assert lineage.names == [first, block_hash(first, b"bbbb")]
    assert lineage.name(0, b"aaaa") is first
    assert (lineage.parent(0), lineage.parent(1), lineage.parent(2)) == (ROOT, first, lineage.names[1])


# ------------------------------------------------------------------------------------------------------- matches


def test_the_run_from_the_start_is_found() -> None:
    index = PrefixIndex(8, 2)
    chain(index, {5: (1, 2), 3: (3, 4), 6: (5, 6)})
    assert match(index, 1, 2, 3, 4, 5, 6, 7) == Match((5, 3, 6))
    assert match(index, 1, 2, 3, 4, 9, 9, 9) == Match((5, 3))
    assert match(index, 9, 9, 3, 4, 5, 6, 7) == Match()  # unbroken from the start, or nothing
    assert len(index) == 3
    assert [index.depths[block] for block in (5, 3, 6)] == [0, 1, 2]


def test_the_last_token_is_left_to_compute() -> None:
    index = PrefixIndex(8, 2)
    chain(index, {0: (1, 2), 1: (3, 4)})
    assert match(index, 1, 2, 3, 4) == Match((0,), tail=1, tail_tokens=1)  # a part of block 1, to be cloned
    assert match(index, 1, 2, 3, 4, 5) == Match((0, 1))
    assert match(index, 1, 2) == Match((), tail=0, tail_tokens=1)


def test_a_prompt_shorter_than_a_block_is_not_matched() -> None:
    index = PrefixIndex(8, 4)
    chain(index, {0: (1, 2, 3, 4)})
    assert match(index, 1, 2, 3) == Match()
    assert match(index, 1, 2, 3, 4) == Match((), tail=0, tail_tokens=3)


def test_blocks_of_one_token() -> None:
    index = PrefixIndex(4, 1)
    chain(index, {0: (1,), 1: (2,)})
    assert match(index, 1) == Match()
    assert match(index, 1, 2) == Match((0,))
    assert match(index, 1, 2, 3) == Match((0, 1))


def test_domains_share_nothing() -> None:
    index = PrefixIndex(8, 2)
    other = root_hash("model", "tenant", "other salt")
    chain(index, {0: (1, 2)})
    chain(index, {1: (1, 2)}, other)
    assert match(index, 1, 2, 3) == Match((0,))
    assert match(index, 1, 2, 3, root=other) == Match((1,))
    assert match(index, 1, 2, 3, root=root_hash("model", "other tenant", "salt")) == Match()


def test_the_longest_shared_part_of_a_child_is_the_tail() -> None:
    index = PrefixIndex(8, 4)
    base = chain(index, {0: (1, 1, 1, 1)})
    for block, tokens in {1: (2, 3, 4, 5), 2: (2, 3, 9, 9), 3: (2, 3, 4), 4: (2,)}.items():
        piece = ids(*tokens).tobytes()
        assert base is not None
        assert index.insert(block, block_hash(index.hash_of(0) or b"", piece), base, ROOT, piece, "tenant")
    index.check_invariants()
    assert match(index, 1, 1, 1, 1, 2, 3, 9, 8, 8) == Match((0,), tail=2, tail_tokens=3)
    assert match(index, 1, 1, 1, 1, 2, 3, 4, 5) == Match((0,), tail=3, tail_tokens=3)  # as long as block 1, and more recent
    assert match(index, 1, 1, 1, 1, 2, 3) == Match((0,), tail=4, tail_tokens=1)
    assert match(index, 1, 1, 1, 1, 7, 7) == Match((0,))
    assert index.filled(3) == 3


def test_a_tail_is_no_parent() -> None:
    index = PrefixIndex(8, 2)
    chain(index, {0: (1, 2), 1: (3,)})
    assert match(index, 1, 2, 3, 4, 5) == Match((0,), tail=1, tail_tokens=1)


def test_children_compared_are_bounded_and_the_recent_ones() -> None:
    index = PrefixIndex(MAX_CHILDREN_COMPARED + 1, 2)
    for block in range(MAX_CHILDREN_COMPARED + 1):
        chain(index, {block: (block, 0)})
    assert match(index, 1, 9) == Match((), tail=1, tail_tokens=1)  # the oldest but one is looked at
    assert match(index, 0, 9) == Match()  # the oldest is not
    assert match(index, 0, 0, 9) == Match((0,))  # a whole block is found by its name, however many there are


# ------------------------------------------------------------------------------------------- inserting, removing


def test_the_first_one_wins() -> None:
    index = PrefixIndex(8, 2)
    node = chain(index, {0: (1, 2)})
    assert chain(index, {1: (1, 2)}) == node == index.node(0)
    assert index.hash_of(1) is None
    end = chain(index, {2: (1, 2), 3: (3, 4)})  # what follows the duplicate stands on the first one
    assert end == index.node(3)
    assert match(index, 1, 2, 3, 4, 5) == Match((0, 3))


def test_nothing_is_hung_on_a_node_that_is_gone() -> None:
    index = PrefixIndex(8, 2)
    node = chain(index, {0: (1, 2)})
    index.remove(0)
    piece = ids(3, 4).tobytes()
    assert index.insert(1, block_hash(b"any", piece), node, ROOT, piece, "tenant") is None
    assert chain(index, {0: (1, 2)}) != node  # again there, but not the same node
    assert index.insert(1, block_hash(b"any", piece), node, ROOT, piece, "tenant") is None
    assert len(index) == 1


def test_a_block_is_in_the_index_once() -> None:
    index = PrefixIndex(8, 2)
    chain(index, {0: (1, 2)})
    with pytest.raises(AssertionError, match="already"):
        chain(index, {0: (7, 7)})


def test_removing_a_node_removes_what_stands_on_it_the_deepest_first() -> None:
    index = PrefixIndex(8, 2)
    chain(index, {0: (1, 2), 1: (3, 4), 2: (5, 6)})
    chain(index, {7: (1, 2), 3: (7, 8), 4: (9,)})
    chain(index, {5: (8, 8)})
    assert index.hash_of(7) is None
    gone = index.remove(1)
    assert gone == [2, 1]
    index.check_invariants()
    assert match(index, 1, 2, 3, 4, 5) == Match((0,))
    gone = index.remove(0)
    assert gone[-1] == 0
    assert sorted(gone) == [0, 3, 4]
    assert gone.index(4) < gone.index(3)
    index.check_invariants()
    assert len(index) == 1
    assert match(index, 8, 8, 1) == Match((5,))


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_siblings_go_in_any_order(order: tuple[int, ...]) -> None:
    index = PrefixIndex(8, 2)
    for block in (1, 2, 3):
        chain(index, {0: (1, 2), block: (block, block)} if block == 1 else {6: (1, 2), block: (block, block)})
    left = {1, 2, 3}
    for block in order:
        assert index.remove(block) == [block]
        left.discard(block)
        index.check_invariants()
        for other in (1, 2, 3):
            assert match(index, 1, 2, other, other, 0).blocks == ((0, other) if other in left else (0,))


@pytest.mark.parametrize("damage", ["_tokens", "_parents", "hashes"])
def test_invariants_see_damage(damage: str) -> None:
    index = PrefixIndex(8, 2)
    chain(index, {0: (1, 2), 1: (3, 4)})
    getattr(index, damage)[1] = b"12345678"
    with pytest.raises(AssertionError):
        index.check_invariants()


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=12), st.data())
def test_matches_agree_with_a_naive_search(sequences: list[list[int]], data: st.DataObject) -> None:
    """Whatever was inserted and removed: the whole blocks are the longest run that is known, the tail the longest part."""
    size, total = 2, 64
    index = PrefixIndex(total, size)
    known: dict[tuple[int, ...], int] = {}  # a prefix (whole blocks, perhaps a tail) -> its block
    free = list(range(total))
    for sequence in sequences:
        name, node = ROOT, None
        for start in range(0, len(sequence), size):
            prefix = tuple(sequence[: start + size])
            piece = ids(*sequence[start : start + size]).tobytes()
            name = block_hash(name, piece)
            node = index.insert(free[-1], name, node, ROOT, piece, "tenant")
            if prefix not in known:
                known[prefix] = free.pop()
            assert node == index.node(known[prefix])
        doomed: tuple[int, ...] | None = data.draw(st.sampled_from([None, *sorted(known)]))
        if doomed is not None:
            gone = {prefix for prefix in known if prefix[: len(doomed)] == doomed}
            if len(doomed) % size:
                gone = {doomed}
            assert set(index.remove(known[doomed])) == {known[prefix] for prefix in gone}
            for prefix in gone:
                del known[prefix]
        index.check_invariants()
    for prompt in sequences:
        limit = len(prompt) - 1
        whole = 0
        while whole + size <= limit and tuple(prompt[: whole + size]) in known:
            whole += size
        found = match(index, *prompt)
        assert found.blocks == tuple(known[tuple(prompt[: end + size])] for end in range(0, whole, size))
        if len(prompt) < size:
            assert found.tail_tokens == 0
            continue
        wanted = prompt[whole : min(limit, whole + size)]
        best = 0
        for prefix in known:
            if prefix[:whole] == tuple(prompt[:whole]) and whole < len(prefix) <= whole + size:
                shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prefix[whole:], wanted, strict=False)))
                best = max(best, len(shared))
        assert found.tail_tokens == best
