"""Scheduler and memory with a simulated executor, under everything that clients do: the strongest test of the two.

Every request must get the tokens of the pure function on its own prompt, whatever was shared, preempted, evicted and computed
again around it; see `memmgr_world`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from memmgr.core import lineage as lineage_module
from memmgr.core import memory as memory_module
from memmgr.core import prefix as prefix_module
from memmgr.core.lineage import HASH_BYTES, block_hash
from memmgr.schedule.plans import EndCode, FinishReason, RequestKey
from tests.memmgr.memmgr_world import World

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "300"))

#: Prompts begin with a part of one of these.
SYSTEM_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9, 9], [0] * 12]


@dataclass(frozen=True)
class Wish:
    """One request, and what its client does about it."""

    base: int
    base_length: int
    more: int  # distinct tokens after the shared ones: as many as its number of bits
    max_tokens: int
    stops: int  # how many of the vocabulary end it
    priority: int
    other_domain: bool
    leaves: str  # "never", "cancel", "deadline", "stop string"
    patience: int  # after so many tokens (stop string, of the first sequence), or turns (cancel, deadline)
    samples: int
    lag: int  # turns from a stop string's last token to the word of it

    @property
    def prompt(self) -> list[int]:
        more = [int(bit) for bit in f"{self.more:b}"] if self.more else []
        return (SYSTEM_PROMPTS[self.base][: self.base_length] + more) or [3]


WISHES = st.builds(
    Wish,
    base=st.sampled_from([0, 0, 1, 2]),
    base_length=st.sampled_from([12, 12, 9, 6, 3, 0]),
    more=st.sampled_from([0, 1, 2, 5, 21, 93, 400, 2**18]),
    max_tokens=st.sampled_from([0, 0, 1, 4, 9]),
    stops=st.sampled_from([0, 0, 0, 1, 4]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    other_domain=st.sampled_from([False, False, False, True]),
    leaves=st.sampled_from(["never", "never", "never", "never", "cancel", "deadline", "stop string"]),
    patience=st.integers(0, 12),
    samples=st.sampled_from([1, 1, 1, 2, 3, 5]),
    lag=st.sampled_from([0, 0, 1, 3, 6]),
)

GAMES = st.lists(WISHES, min_size=2, max_size=10)

#: What happens next: a request comes, a plan is made, a result comes back. In one draw, two bits for each turn.
TURNS = st.integers(0, 4**60).map(lambda bits: [["submit", "plan", "plan", "result"][bits >> 2 * turn & 3] for turn in range(60)])


@st.composite
def worlds(draw: st.DrawFn, records: bool = False) -> World:
    """Worlds in which each request fits alone (most of them), and few fit together; with records where they are wanted."""
    block_size = draw(st.integers(1, 5))
    spare = draw(st.sampled_from([0, 0, 2])) if records else 0  # blocks beyond the longest request: they may be pinned
    blocks = -(-26 // block_size) + draw(st.sampled_from([0, 0, 1, 3, 8])) + spare
    max_running = draw(st.integers(1, 6))
    return World(
        blocks=blocks,
        block_size=block_size,
        max_running=max_running,
        max_waiting=draw(st.sampled_from([16, 16, 3])),
        max_step_tokens=max_running + draw(st.integers(0, 16)),
        context_length=(blocks - spare) * block_size - draw(st.sampled_from([0, 0, 1, 3])),
        vocabulary=12,
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        host_blocks=draw(st.sampled_from([0, 0, 4, 100])),
        records=[] if records else None,
    )


class Play:
    """A world with its wishes."""

    def __init__(self, world: World, wishes: list[Wish]) -> None:
        self.world = world
        self.coming = list(reversed(wishes))
        self.wishes: dict[RequestKey, Wish] = {}
        self.born: dict[RequestKey, int] = {}
        self.left: set[RequestKey] = set()
        self.seen: dict[RequestKey, int] = {}  # the turn in which a stop string's last token came
        self.turn = 0

    def take(self, turn: str) -> None:
        world = self.world
        self.turn += 1
        world.now = float(self.turn)
        if turn == "submit" and self.coming:
            wish = self.coming.pop()
            key = world.submit(
                wish.prompt,
                wish.max_tokens,
                stop=range(wish.stops),
                priority=wish.priority,
                salt="other" if wish.other_domain else "",
                deadline=world.now + wish.patience if wish.leaves == "deadline" else float("inf"),
                samples=wish.samples,
            )
            self.wishes[key], self.born[key] = wish, self.turn
        elif turn == "plan":
            world.plan()
        elif turn == "result":
            world.complete()
        world.scheduler.check_invariants()
        self.leave()
        world.scheduler.check_invariants()

    def leave(self) -> None:
        """Let those who have had enough go."""
        for key, wish in self.wishes.items():
            client = self.world.clients[key]
            if key in self.left or client.end is not None:
                continue
            if wish.leaves == "cancel" and self.turn - self.born[key] >= wish.patience:
                self.left.add(key)
                assert self.world.scheduler.cancel(key, EndCode.CANCELLED, "enough", self.world.now)
            elif wish.leaves == "stop string" and 0 not in client.sequence_ends and len(client.tokens) >= max(1, wish.patience):
                if self.turn - self.seen.setdefault(key, self.turn) < wish.lag:
                    continue
                self.left.add(key)
                self.world.scheduler.finish(key, 0, max(1, wish.patience), self.world.now)
            self.world.listen()

    def drain(self) -> None:
        """Go on to the end.

        The running request of the best rank is never preempted (the victim is the running one of the last rank, and what is
        alone fits: the context is no longer than the pool). Of any three plans, two in flight, at least one computes a token of
        it, or it ends. So it ends after 3 * (context + 1) plans at most, or one of better rank is admitted before; that happens
        at most once for each request. So of n requests one ends within 3 * n * (context + 1) plans, and all within n times that;
        where requests have up to m sequences, within m times that.
        """
        while self.coming:
            self.take("submit")
        requests = len(self.wishes)
        for _ in range(15 * requests**2 * (self.world.limits.context_length + 1) + 3):
            self.take("plan")
            self.take("plan")
            if not self.world.in_flight:
                return
            self.take("result")
        raise AssertionError("it does not come to an end")

    def judge(self) -> None:
        for key, wish in self.wishes.items():
            client = self.world.clients[key]
            assert client.end is not None
            if client.end.code in {EndCode.NEVER_FITS, EndCode.QUEUE_FULL}:
                fits = len(wish.prompt) < self.world.context(key) and wish.samples <= self.world.limits.max_running
                assert (client.end.code is EndCode.NEVER_FITS) == (not fits)
                assert client.tokens == []
                continue
            if wish.leaves == "never" or (wish.leaves == "stop string" and key not in self.left):
                self.world.check_answer(key)
                continue
            for index, outputs in client.outputs.items():
                tokens, reason = self.world.expected(key, index)
                assert outputs == tokens[: len(outputs)]
                if index and client.end.code is EndCode.OK:
                    assert client.sequence_ends[index].reason is reason
                    assert outputs == tokens
            if wish.leaves == "stop string":
                assert client.end.code is EndCode.OK
                assert client.sequence_end is not None
                assert client.sequence_end.reason is FinishReason.STOP
                assert client.sequence_end.output_tokens == max(1, wish.patience) <= len(client.tokens)
            elif client.end.code is EndCode.OK:
                self.world.check_answer(key)
            else:
                assert client.end.code is {"cancel": EndCode.CANCELLED, "deadline": EndCode.DEADLINE}[wish.leaves]


def play(world: World, wishes: list[Wish], turns: list[str]) -> None:
    game = Play(world, wishes)
    for turn in turns:
        game.take(turn)
    game.drain()
    game.judge()
    world.check_view()
    world.check_idle()


COMMON = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@COMMON
@given(worlds(), GAMES, TURNS)
def test_every_request_gets_its_own_answer(world: World, wishes: list[Wish], turns: list[str]) -> None:
    play(world, wishes, turns)


@settings(COMMON, max_examples=EXAMPLES // 3)
@given(worlds(), GAMES, TURNS)
def test_also_where_hashes_collide(world: World, wishes: list[Wish], turns: list[str]) -> None:
    def weak_hash(parent: bytes, tokens: bytes) -> bytes:
        return bytes([block_hash(parent, tokens)[0] % 4]) * HASH_BYTES

    with pytest.MonkeyPatch.context() as patch:
        for module in lineage_module, prefix_module, memory_module:
            patch.setattr(module, "block_hash", weak_hash)
        play(world, wishes, turns)
