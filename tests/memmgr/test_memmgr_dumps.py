"""A dump that is made piece by piece, while everything changes, is that of one instant: its last."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr import dumps
from memmgr.dumps import Dump, Part
from memmgr.engine import Engine
from memmgr.events import EventLog
from memmgr.prefix_views import NODES_AT_ONCE, snapshot_tree, tree_of
from memmgr.schedule.plans import EndCode
from tests.memmgr.memmgr_world import World
from tests.memmgr.test_memmgr_simulation import COMMON, EXAMPLES, GAMES, TURNS, Play, Wish, worlds


class Place:
    """A world as the engine shows it."""

    def __init__(self, world: World, most_events: int = 2**18) -> None:
        self.world = world
        self.session: object = SimpleNamespace(memory=world.memory)
        self.events = EventLog(most_events)

    def take_events(self) -> int:
        assert self.world.records is not None
        self.events.take(self.world.records, self.world.now, self.world.steps, self.world.memory.block_size)
        return self.events.cursor

    @property
    def engine(self) -> Engine:
        return cast(Engine, self)


def rows(parts: list[Part]) -> list[tuple[object, ...]]:
    """Return all that is known of each block, in order."""
    return [row for part in parts for row in zip(*part[1:], strict=True)]


def at_once(place: Place) -> Dump:
    dump = Dump(0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "PIECE_BLOCKS", 1 << 20)
        assert dump.take(place.engine)
    return dump


@settings(COMMON, max_examples=EXAMPLES // 3)
@given(worlds(records=True), GAMES, TURNS, st.integers(1, 5), st.sampled_from([2**18, 2**18, 20]))
def test_pieces_are_brought_to_one_instant(
    world: World, wishes: list[Wish], turns: list[str], piece: int, most_events: int
) -> None:
    game, place = Play(world, wishes), Place(world, most_events)
    dump, complete = Dump(0, 0), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "PIECE_BLOCKS", piece)
        for number, turn in enumerate(turns):
            game.take(turn)
            place.take_events()
            if number == 40:
                world.memory.flush()
            if dump.take(place.engine):
                whole = at_once(place)
                parts = list(dump.read())
                assert rows(parts) == rows(list(whole.read()))
                assert dump.cursor == whole.cursor
                _, nodes = snapshot_tree(place.engine, "", 0, NODES_AT_ONCE)
                expected = list(nodes)
                found = list(tree_of(parts, "", 0))
                assert sorted(found) == sorted(expected)
                if len({node.parent for node in expected if node.depth == 0}) == 1:
                    assert found == expected, "the order is another"
                assert list(tree_of(parts, "tenant", 2)) == [node for node in found if node.depth < 2]
                dump, complete = Dump(0, 0), complete + 1
    assert complete or world.memory.pool.total > piece


def test_a_part_of_the_pool() -> None:
    world = World(blocks=40, records=[])
    world.submit(range(12, 52), max_tokens=3)
    place = Place(world)
    dump = Dump(30, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "PIECE_BLOCKS", 2)
        for _ in range(2):
            assert not dump.take(place.engine)
            world.step()
        assert dump.take(place.engine)
    assert rows(list(dump.read())) == rows(list(at_once(place).read()))[30:35]
    beyond = Dump(40, 0)
    assert beyond.take(place.engine)
    assert rows(list(beyond.read())) == []


def test_another_pool_and_none_in_the_middle_of_a_dump() -> None:
    first, second = World(blocks=10, records=[]), World(blocks=7, records=[])
    place = Place(first)
    dump = Dump(0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "PIECE_BLOCKS", 3)
        assert not dump.take(place.engine)
        place.world, place.session = second, SimpleNamespace(memory=second.memory)
        assert list(islice(iter(lambda: dump.take(place.engine), True), 10)) == [False, False]
        assert len(rows(list(dump.read()))) == 7
        dump = Dump(0, 0)
        assert not dump.take(place.engine)
        place.session = None
        assert dump.take(place.engine)
        assert list(dump.read()) == []


def test_where_more_happens_than_is_remembered_it_is_made_at_once() -> None:
    world = World(blocks=40, records=[])
    place = Place(world, most_events=4)
    dump = Dump(0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "PIECE_BLOCKS", 10)
        taken = 1
        while not dump.take(place.engine):
            taken += 1
            for number in range(3):
                world.submit(range(number, number + 30), max_tokens=2)
            world.run()
            world.scheduler.abandon(EndCode.UNAVAILABLE, "over", world.now)
            world.listen()
            place.take_events()
    assert taken == 4  # three beginnings in vain, and all at once
    assert rows(list(dump.read())) == rows(list(at_once(place).read()))
