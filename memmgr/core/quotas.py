"""Tenants' quotas: how many live blocks each tenant has, how many it may have, how many are kept back for it.

A live block belongs to one tenant: prefixes are rooted in their tenant, so nothing is shared across tenants. It is charged when
it becomes live and discharged when its last reference goes; cached blocks are nobody's, they count as available to all.

    max_blocks           a tenant takes no block that would make it more than these; 0: no limit
    guaranteed_blocks    the floor: of these, what the tenant does not use is kept back from all others

    owed                 the sum of max(0, guaranteed - used): what is kept back in all
    room(tenant)         min(available - what is kept back for others, max_blocks - used)

A limit that is lowered below its tenant's use takes nothing away by itself: the tenant takes no further block until it is under
the limit again. A tenant within its floor always finds room as long as owed <= available. Growth keeps that up; what can break
it is a floor set while others use the blocks, and a pinned block that ends to be live: `deficit` tells, and who schedules
settles it.

Every operation costs the same however many blocks and tenants there are. Knows blocks and the names of tenants; not requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may have; 0 in all is the same as no quota. `max_running` counts sequences in the batch."""

    tenant: str
    max_blocks: int = 0
    guaranteed_blocks: int = 0
    max_running: int = 0

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.max_blocks or self.guaranteed_blocks or self.max_running)


class Quotas:
    """The quotas in force over one pool, and the use of it. See the module."""

    __slots__ = ("_floors", "_limits", "_quotas", "_tenants", "_used", "guaranteed", "owed")

    def __init__(self, total_blocks: int) -> None:
        self.guaranteed = 0  # the sum of all floors
        self.owed = 0
        self._quotas: dict[str, Quota] = {}
        self._limits: dict[str, int] = {}  # tenant -> max_blocks, where there is one
        self._floors: dict[str, int] = {}  # tenant -> guaranteed_blocks, where there are any
        self._used: dict[str, int] = {}  # tenant -> live blocks, where it has any
        self._tenants: Final = [""] * total_blocks  # of each live block

    def __len__(self) -> int:
        return len(self._quotas)

    def __iter__(self) -> Iterator[Quota]:
        return iter(self._quotas.values())

    def set(self, quota: Quota) -> None:
        """Put a tenant's quota in force in place of the one before; an empty one takes it away."""
        tenant = quota.tenant
        assert not quota.max_blocks or quota.guaranteed_blocks <= quota.max_blocks
        self.owed -= self.unused_floor(tenant)
        for table, value in (self._limits, quota.max_blocks), (self._floors, quota.guaranteed_blocks):
            table.pop(tenant, None)
            if value:
                table[tenant] = value
        self._quotas.pop(tenant, None)
        if not quota.empty:
            self._quotas[tenant] = quota
        self.guaranteed = sum(self._floors.values())
        self.owed += self.unused_floor(tenant)

    # -------------------------------------------------------------------------------------------------- reading

    def max_running(self, tenant: str) -> int:
        """Return how many sequences of a tenant may run; 0: no limit."""
        quota = self._quotas.get(tenant)
        return 0 if quota is None else quota.max_running

    def tenant(self, block: int) -> str:
        """Return whose a live block is."""
        return self._tenants[block]

    def used(self, tenant: str) -> int:
        """Return how many live blocks a tenant has."""
        return self._used.get(tenant, 0)

    def limit(self, tenant: str) -> int | None:
        """Return how many live blocks a tenant may have; None: as many as there are."""
        return self._limits.get(tenant)

    def floor(self, tenant: str) -> int:
        """Return how many blocks are guaranteed to a tenant."""
        return self._floors.get(tenant, 0)

    def unused_floor(self, tenant: str) -> int:
        """Return how many blocks are kept back for a tenant."""
        return max(0, self._floors.get(tenant, 0) - self._used.get(tenant, 0)) if self._floors else 0

    def beyond_floor(self, tenant: str) -> bool:
        """Whether a tenant has more than is guaranteed to it."""
        return self._used.get(tenant, 0) > self._floors.get(tenant, 0)

    def allowance(self, tenant: str) -> int | None:
        """Return how many more blocks a tenant's limit allows, below 0 where it is over it; None: no limit."""
        limit = self._limits.get(tenant)
        return None if limit is None else limit - self._used.get(tenant, 0)

    def room(self, tenant: str, available: int) -> int:
        """Return how many blocks a tenant may take now of those that are available."""
        if not self._quotas:
            return available
        room = available - self.owed + self.unused_floor(tenant)
        allowance = self.allowance(tenant)
        return room if allowance is None else min(room, allowance)

    def kept_back(self, tenant: str, promised: dict[str, int]) -> int:
        """Return how many blocks are not a tenant's to begin with: what others were promised or guaranteed, and its own promises.

        What running requests still have to take, `promised` by tenant, counts towards their floor.
        """
        kept = sum(promised.values())
        for other in self._floors:
            if other != tenant:
                kept += max(0, self.unused_floor(other) - promised.get(other, 0))
        return kept

    def deficit(self, available: int) -> int:
        """Return how many blocks are missing to what is guaranteed and not used; 0 or less: none."""
        return self.owed - available

    # -------------------------------------------------------------------------------------------------- charging

    def charge(self, block: int, tenant: str) -> None:
        """Take note that a block is live, and whose it is."""
        self._tenants[block] = tenant
        self._use(tenant, 1)

    def charge_all(self, blocks: list[int], tenant: str) -> None:
        """Take note that some blocks are live, and whose they are."""
        for block in blocks:
            self._tenants[block] = tenant
        self._use(tenant, len(blocks))

    def charge_again(self, block: int, count: int) -> None:
        """Take note that so many blocks that were cached are live again, `block` among them or another of their tenant's.

        A block that is cached belongs, once it is live, to whom it belonged before.
        """
        self._use(self._tenants[block], count)

    def charge_like(self, block: int, other: int) -> None:
        """Take note that a block is live and belongs to the tenant of a live one."""
        self.charge(block, self._tenants[other])

    def discharge(self, block: int, count: int = 1) -> None:
        """Take note that so many blocks are live no more, all of the tenant that this one belonged to."""
        tenant = self._tenants[block]
        used = self._used[tenant] - count
        assert used >= 0, f"tenant {tenant!r} gives back more than it has"
        if used:
            self._used[tenant] = used
        else:
            del self._used[tenant]
        if self._floors:
            self.owed += max(0, min(count, self._floors.get(tenant, 0) - used))

    def _use(self, tenant: str, count: int) -> None:
        used = self._used.get(tenant, 0)
        if self._quotas:
            allowed = self._limits.get(tenant, used + count)
            assert used + count <= allowed, f"tenant {tenant!r} takes a block beyond its limit"
            self.owed -= max(0, min(count, self._floors.get(tenant, 0) - used))
        self._used[tenant] = used + count

    # ------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self, live: Iterator[int]) -> int:
        """Check the counts against the blocks that are `live`. Returns how many checks were made.

        Raises:
            AssertionError: one does not hold.
        """
        counted: dict[str, int] = {}
        for block in live:
            tenant = self._tenants[block]
            counted[tenant] = counted.get(tenant, 0) + 1
        assert counted == self._used, f"{self._used} blocks are charged to tenants, {counted} are live"
        assert self._floors == {q.tenant: q.guaranteed_blocks for q in self if q.guaranteed_blocks}
        assert self._limits == {q.tenant: q.max_blocks for q in self if q.max_blocks}
        assert self.guaranteed == sum(self._floors.values())
        owed = sum(max(0, floor - counted.get(tenant, 0)) for tenant, floor in self._floors.items())
        assert owed == self.owed, f"{owed} blocks are to be kept back, {self.owed} are"
        assert not any(quota.empty for quota in self), "a quota that says nothing is kept"
        return sum(counted.values()) + 6
