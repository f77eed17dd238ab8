"""Quotas under everything that clients and administrators do, with a simulated executor; see `memmgr_world`.

Three tenants: one whose quota changes all the time, one that has a floor at times, and one that never has any quota. Whoever has
no limit gets exactly the tokens of the pure function, whatever the others do; everyone gets a prefix of them, and an end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from memmgr.core.quotas import Quota
from memmgr.schedule.plans import EndCode, FinishReason, Plan, RequestKey
from memmgr.schedule.requests import Request
from tests.memmgr.memmgr_world import World

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "300"))

NOISY, FLOORED, PLAIN = "noisy", "floored", "plain"
SYSTEM_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@dataclass(frozen=True)
class Wish:
    """One request."""

    tenant: str
    base_length: int
    more: int
    max_tokens: int
    priority: int
    samples: int
    beam_width: int
    cancelled_after: int  # turns; 0: never

    @property
    def prompt(self) -> list[int]:
        return (SYSTEM_PROMPT[: self.base_length] + [int(bit) for bit in f"{self.more:b}"][1:]) or [3]


WISHES = st.builds(
    Wish,
    tenant=st.sampled_from([NOISY, NOISY, FLOORED, PLAIN]),
    base_length=st.sampled_from([12, 9, 6, 3, 0]),
    more=st.sampled_from([1, 2, 5, 21, 93, 400]),
    max_tokens=st.sampled_from([0, 1, 4, 9]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    samples=st.sampled_from([1, 1, 1, 2, 3]),
    beam_width=st.sampled_from([0, 0, 0, 0, 2, 3]),
    cancelled_after=st.sampled_from([0, 0, 0, 0, 5]),
)

#: (tenant, max_blocks, guaranteed_blocks, max_running): a floor is cut to what may be guaranteed.
QUOTAS = st.tuples(
    st.sampled_from([NOISY, NOISY, FLOORED]), st.sampled_from([0, 2, 4, 7]), st.integers(0, 6), st.sampled_from([0, 0, 1, 2])
)

TURNS = st.integers(0, 8**60).map(
    lambda bits: [
        ["submit", "plan", "plan", "plan", "result", "result", "quota", "submit"][bits >> 3 * turn & 7] for turn in range(60)
    ]
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Worlds with some blocks beyond the longest request: they may be guaranteed."""
    block_size = draw(st.integers(1, 4))
    blocks = -(-26 // block_size)
    max_running = draw(st.integers(1, 6))
    return World(
        blocks=blocks + draw(st.sampled_from([2, 4, 8])),
        block_size=block_size,
        max_running=max_running,
        max_step_tokens=max_running + draw(st.integers(0, 16)),
        context_length=blocks * block_size - draw(st.sampled_from([0, 1])),
        vocabulary=12,
        prefix_cache=draw(st.sampled_from([True, True, False])),
        host_blocks=draw(st.sampled_from([0, 0, 4, 20])),
    )


class Play:
    """A world with its wishes, and the most that each tenant may be found to have."""

    def __init__(self, world: World, wishes: list[Wish], quotas: list[tuple[str, int, int, int]]) -> None:
        self.world = world
        self.coming = list(reversed(wishes))
        self.quotas = list(reversed(quotas))
        self.wishes: dict[RequestKey, Wish] = {}
        self.born: dict[RequestKey, int] = {}
        self.ceilings: dict[str, int] = {}  # tenant -> live blocks: its limit, or what it had when that was lowered
        self.running: dict[str, int] = {}  # the same for sequences
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
                stop=[1],
                priority=wish.priority,
                samples=1 if wish.beam_width else wish.samples,
                beam_width=wish.beam_width,
                tenant=wish.tenant,
            )
            self.wishes[key], self.born[key] = wish, self.turn
        elif turn == "plan":
            plan = world.plan()
            assert world.memory.quotas.deficit(world.memory.pool.available) <= 0
            if plan is not None:
                self.check_floors(plan)
        elif turn == "result":
            world.complete()
        elif turn == "quota" and self.quotas:
            self.set_quota(*self.quotas.pop())
        for key, wish in self.wishes.items():
            if wish.cancelled_after and self.turn - self.born[key] >= wish.cancelled_after and world.clients[key].end is None:
                world.scheduler.cancel(key, EndCode.CANCELLED, "enough", world.now)
                world.listen()
        world.scheduler.check_invariants()
        self.check_limits()

    def set_quota(self, tenant: str, max_blocks: int, floor: int, max_running: int) -> None:
        scheduler, quotas = self.world.scheduler, self.world.memory.quotas
        most = scheduler.most_pinned - quotas.guaranteed + quotas.floor(tenant)
        floor = max(0, min(floor, most, max_blocks or floor))
        limit = max_blocks if tenant == NOISY else 0
        scheduler.set_quota(Quota(tenant, limit, floor, max_running), self.world.now)
        self.world.listen()
        self.ceilings[tenant] = max(limit, quotas.used(tenant)) if limit else self.world.memory.pool.total
        now = sum(len(one.live) for one in scheduler.running if one.submission.tenant == tenant)
        self.running[tenant] = max(max_running, now) if max_running else self.world.limits.max_running

    def check_limits(self) -> None:
        """No tenant takes a block beyond its limit, or lets a sequence run: what it had too many of only becomes less."""
        quotas = self.world.memory.quotas
        for quota in quotas:
            used, tenant = quotas.used(quota.tenant), quota.tenant
            assert used <= self.ceilings[tenant]
            if quota.max_blocks:
                self.ceilings[tenant] = max(quota.max_blocks, min(used, self.ceilings[tenant]))
            requests = [one for one in self.world.scheduler.running if one.submission.tenant == tenant]
            running = sum(len(one.live) for one in requests)
            assert running <= self.running[tenant] or len(requests) == 1
            if quota.max_running:
                self.running[tenant] = max(quota.max_running, min(running, self.running[tenant]))

    def check_floors(self, plan: Plan) -> None:
        """Nobody waits for blocks that are guaranteed to its tenant, once the step had room for more."""
        scheduler, memory = self.world.scheduler, self.world.memory
        if sum(chunk.count for chunk in plan.chunks) >= self.world.limits.max_step_tokens:
            return
        firsts: dict[str, Request] = {}
        for request in scheduler.waiting:
            firsts.setdefault(request.submission.tenant, request)
        for quota in memory.quotas:
            first = firsts.get(quota.tenant)
            running = [one for one in scheduler.running if one.submission.tenant == quota.tenant]
            if first is None or first.in_flight or running or not quota.guaranteed_blocks:
                continue
            free = self.world.limits.max_running - scheduler.running_sequences
            if any(len(one.live) > free for one in scheduler.waiting if one.rank <= first.rank):
                continue  # it is the batch that is full for one that is before it, or for itself: no quota promises a place there
            needed = memory.blocks_charged(first.trunk.lineage, first.trunk_tokens)
            most = memory.blocks_for(max(one.promised for one in first.live) + 1) * len(first.live)
            assert max(needed, most) > quota.guaranteed_blocks, "it would fit what is guaranteed to its tenant"

    def drain(self) -> None:
        """Go on to the end: of the requests that may run, the one of best rank gets on, as in test_memmgr_simulation."""
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
            assert client.end is not None, "a request without an end"
            if client.end.code is EndCode.NEVER_FITS:
                assert not client.tokens
                limited = wish.tenant != PLAIN
                width = client.submission.width
                assert limited or len(wish.prompt) >= self.world.context(key) or width > self.world.limits.max_running
                continue
            if client.end.code is EndCode.CANCELLED:
                assert wish.cancelled_after
                continue
            assert client.end.code is EndCode.OK
            if wish.tenant != NOISY:
                self.world.check_answer(key)
                continue
            if wish.beam_width:
                continue  # how long its beams could get was another matter at another time
            for index in range(wish.samples):
                tokens, reason = self.world.expected(key, index)
                outputs, end = client.outputs.get(index, []), client.sequence_ends[index]
                assert end.output_tokens == len(outputs)
                assert outputs == tokens[: len(outputs)]
                assert end.reason is FinishReason.CONTEXT or (end.reason, outputs) == (reason, tokens)


@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), st.lists(WISHES, min_size=2, max_size=10), st.lists(QUOTAS, max_size=8), TURNS)
def test_quotas_hold_and_every_request_ends(
    world: World, wishes: list[Wish], quotas: list[tuple[str, int, int, int]], turns: list[str]
) -> None:
    game = Play(world, wishes, quotas)
    for turn in turns:
        game.take(turn)
    game.drain()
    game.judge()
    world.check_view()
    ends = {client.end.code for client in world.clients.values() if client.end is not None}
    world.check_idle(cut_short=EndCode.NEVER_FITS in ends)
