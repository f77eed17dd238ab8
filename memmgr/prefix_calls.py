"""The admin calls about prefixes: the tree, a dry run, pins, flushing."""

import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice
from typing import Final

from kilburn.limits import MAX_SAMPLES
from kilburn.v1 import admin_pb2 as admin
from memmgr.calls import Calls, Context, abort, read_ttl, tenant_for
from memmgr.dumps import Dump
from memmgr.prefix_views import NODES_AT_ONCE, pin_message, prefix_pages, probe_message, snapshot_tree, tree_of
from memmgr.reasons import Code
from memmgr.schedule.probe import probe
from memmgr.session import NotCachedError, PinRefusedError, Session

#: Blocks looked at between two steps while the cache is flushed: some 20 ms, where all of them are cached.
_FLUSHED_AT_ONCE: Final = 8192


class PrefixCalls(Calls):
    """See the module."""

    async def GetPrefixTree(  # noqa: N802
        self, request: admin.GetPrefixTreeRequest, context: Context
    ) -> AsyncIterator[admin.PrefixPage]:
        """The prefix index, depth first, in pages, all of one instant."""
        tenant, max_depth, max_nodes = request.tenant, request.max_depth, request.max_nodes
        if 0 < max_nodes <= NODES_AT_ONCE:
            cursor, nodes = await self.ask(context, lambda: snapshot_tree(self.engine, tenant, max_depth, max_nodes))
        else:
            dump = Dump(0, 0)
            while not await self.ask(context, lambda: dump.take(self.engine)):
                pass
            cursor, nodes = dump.cursor, islice(tree_of(list(dump.read()), tenant, max_depth), max_nodes or None)
        for page in prefix_pages(nodes, cursor, with_tokens=request.with_tokens):
            yield page

    async def Probe(self, request: admin.ProbeRequest, context: Context) -> admin.ProbeResponse:  # noqa: N802
        """What would become of a prompt if it came now."""
        if request.n > MAX_SAMPLES:
            await abort(
                context,
                Code.INVALID_VALUE,
                f"n is {request.n}; at most {MAX_SAMPLES} sequences are made of one prompt",
                "n",
            )
        tenant = await tenant_for(context, request.tenant)
        tokens = await self.read_prefix(context, request.token_ids, request.cache_salt)

        def dry_run(session: Session) -> admin.ProbeResponse:
            found = probe(session.scheduler, tenant, request.cache_salt, tokens, request.max_tokens, max(1, request.n))
            return probe_message(found)

        return await self.ask_session(context, dry_run)

    async def PinPrefix(self, request: admin.PinPrefixRequest, context: Context) -> admin.Pin:  # noqa: N802
        """Keep what is cached of a prefix."""
        tenant = await tenant_for(context, request.tenant)
        ttl_seconds = await read_ttl(context, request.ttl_seconds)
        tokens = await self.read_prefix(context, request.token_ids, request.cache_salt)

        def pin(session: Session) -> admin.Pin:
            now = time.monotonic()
            made = session.pin(tenant, request.cache_salt, tokens, ttl_seconds, now)
            return pin_message(made, _pin_id(session, made.number), session.model.block_size, now)

        try:
            return await self.ask_session(context, pin)
        except NotCachedError as error:
            await abort(context, Code.NOT_CACHED, str(error))
        except PinRefusedError as error:
            await abort(context, Code.TOO_MUCH_PINNED, str(error))

    async def UnpinPrefix(self, request: admin.UnpinPrefixRequest, context: Context) -> admin.UnpinPrefixResponse:  # noqa: N802
        """End a pin."""

        def unpin() -> bool:
            session = self.engine.session
            if session is None:
                return False
            pins = session.scheduler.memory.pins
            numbers = [pin.number for pin in pins if _pin_id(session, pin.number) == request.pin_id]
            return any(pins.unpin(number) for number in numbers)

        if not await self.ask(context, unpin):
            await abort(context, Code.NO_PIN, f"there is no pin {request.pin_id!r}; it may have expired", "pin_id")
        return admin.UnpinPrefixResponse()

    async def ListPins(self, request: admin.ListPinsRequest, context: Context) -> AsyncIterator[admin.Pin]:  # noqa: N802
        """All pins, the oldest first."""

        def pins() -> list[admin.Pin]:
            session, now = self.engine.session, time.monotonic()
            if session is None:
                return []
            session.expire(now)
            size = session.model.block_size
            return [pin_message(pin, _pin_id(session, pin.number), size, now) for pin in session.scheduler.memory.pins]

        for pin in await self.ask(context, pins):
            yield pin

    async def FlushPrefixCache(  # noqa: N802
        self, request: admin.FlushPrefixCacheRequest, context: Context
    ) -> admin.FlushPrefixCacheResponse:
        """Free what is cached, a tenant's or all: part by part, so that no step waits for all of it."""
        session = self.engine.session
        if session is None:
            return admin.FlushPrefixCacheResponse()
        memory = session.scheduler.memory
        flushed = 0
        for first in range(0, memory.pool.total, _FLUSHED_AT_ONCE):
            part = range(first, min(memory.pool.total, first + _FLUSHED_AT_ONCE))
            flushed += await self.ask(context, partial(self._flush, session, part, request.tenant))
        return admin.FlushPrefixCacheResponse(flushed_blocks=flushed)

    def _flush(self, session: Session, part: range, tenant: str) -> int:
        return session.scheduler.memory.flush_part(part, tenant) if self.engine.session is session else 0


def _pin_id(session: Session, number: int) -> str:
    """Return the name of a pin: of one executor's pool, so that it means nothing in the next one."""
    return f"{session.incarnation:016x}-{number}"
