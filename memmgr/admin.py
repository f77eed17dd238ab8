"""The admin gRPC: what anyone may know about the blocks, answered between two steps by the engine's thread.

Runs in a thread and an event loop of its own, so that serving, serializing and slow readers cost the steps nothing.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kilburn.config import Address
from kilburn.errors import StartError
from kilburn.limits import MAX_EVENTS_EXPLAINED, MAX_GRPC_MESSAGE_BYTES, MAX_WATCHERS
from kilburn.log import Logger
from kilburn.v1 import admin_pb2 as admin
from kilburn.v1 import admin_pb2_grpc
from memmgr import views
from memmgr.calls import ANSWER_SECONDS, Context, abort, check_enum, tenant_for
from memmgr.dumps import Dump
from memmgr.engine import Engine
from memmgr.events import Batch, history, read_page
from memmgr.guard import Guard
from memmgr.prefix_calls import PrefixCalls
from memmgr.quota_calls import QuotaCalls
from memmgr.reasons import Code
from memmgr.schedule.plans import EndCode

_SERVICE: Final = admin.DESCRIPTOR.services_by_name["Admin"].full_name

#: How often a call that watches looks for news.
_NEWS_SECONDS: Final = 0.05

#: How long a stop waits for calls to end.
_GRACE_SECONDS: Final = 1.0

#: How long the server may take to bind.
_START_SECONDS: Final = 20.0


class AdminService(PrefixCalls, QuotaCalls):
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._incarnation = f"{engine.incarnation:016x}"
        self._watchers = 0
        self._stopping = False

    def stop(self) -> None:
        """Let the calls that watch end."""
        self._stopping = True

    async def GetPool(self, request: admin.GetPoolRequest, context: Context) -> admin.Pool:  # noqa: N802
        """The pool's figures at one instant."""
        return await self.ask(context, lambda: views.pool(self.engine, time.monotonic()))

    async def ListSequences(  # noqa: N802
        self, request: admin.ListSequencesRequest, context: Context
    ) -> AsyncIterator[admin.SequencePage]:
        """All live sequences, in pages."""
        await check_enum(context, [request.state], admin.SequenceState.DESCRIPTOR, "state")

        def snapshot() -> tuple[int, list[tuple[views.SequenceSnapshot, list[int]]]]:
            return self.engine.take_events(), [
                (sequence, views.snapshot_references(self.engine, sequence) if request.with_block_tables else [])
                for sequence in views.snapshot_sequences(self.engine, time.monotonic())
                if (not request.state or sequence.message.state == request.state)
                and (not request.tenant or sequence.message.tenant == request.tenant)
            ]

        cursor, found = await self.ask(context, snapshot)
        messages = (
            views.with_table(sequence, references) if request.with_block_tables else sequence.message
            for sequence, references in found
        )
        for page in views.sequence_pages(messages, cursor):
            yield page

    async def GetSequence(self, request: admin.GetSequenceRequest, context: Context) -> admin.Sequence:  # noqa: N802
        """One sequence with its whole block table."""
        tenant = await tenant_for(context, request.tenant)

        def snapshot() -> tuple[views.SequenceSnapshot, list[int]] | None:
            session = self.engine.session
            found = session.scheduler.find(tenant, request.request_id) if session else None
            live = {sequence.index: sequence for sequence in found.live} if found else {}
            if session is None or request.index not in live:
                return None
            sequence = views.snapshot_sequence(live[request.index], session.memory, time.monotonic())
            return sequence, views.snapshot_references(self.engine, sequence)

        found = await self.ask(context, snapshot)
        if found is None:
            await abort(
                context,
                Code.NO_SEQUENCE,
                f"tenant {tenant!r} has no live request {request.request_id!r} with a sequence {request.index}",
            )
        return views.with_table(*found)

    async def ListBlocks(  # noqa: N802
        self, request: admin.ListBlocksRequest, context: Context
    ) -> AsyncIterator[admin.BlockPage]:
        """The pool's blocks, in pages, all of one instant."""
        await check_enum(context, [request.state], admin.BlockState.DESCRIPTOR, "state")
        dump, snapshot = Dump(request.first, request.limit), None
        while snapshot is None:
            snapshot = await self.ask(context, lambda: views.snapshot_blocks(self.engine, dump, time.monotonic()))
        for page in views.block_pages(snapshot, request.state, request.min_references):
            yield page

    async def ExplainBlock(self, request: admin.ExplainBlockRequest, context: Context) -> admin.BlockHistory:  # noqa: N802
        """A block as it is, and the last events that touched it."""

        def snapshot() -> tuple[views.BlocksSnapshot | None, list[Batch]]:
            blocks = views.snapshot_blocks(self.engine, Dump(request.block, 1), time.monotonic())
            return blocks, self.engine.events.after(0)

        blocks, batches = await self.ask(context, snapshot)
        found = [] if blocks is None else [block for page in views.block_pages(blocks, 0, 0) for block in page.blocks]
        if not found:
            await abort(context, Code.NO_BLOCK, f"there is no block {request.block}", "block")
        events = await asyncio.to_thread(history, batches, request.block, MAX_EVENTS_EXPLAINED, self._incarnation)
        return admin.BlockHistory(block=found[0], events=events)

    async def WatchEvents(  # noqa: N802
        self, request: admin.WatchEventsRequest, context: Context
    ) -> AsyncIterator[admin.EventPage]:
        """What happens to blocks, as it happens, for as long as the client listens."""
        await check_enum(context, set(request.kinds), admin.EventKind.DESCRIPTOR, "kinds")
        if self._watchers >= MAX_WATCHERS:
            await abort(context, Code.TOO_MANY_WATCHERS, f"{MAX_WATCHERS} calls watch the events already")
        self._watchers += 1
        try:
            async for page in self._watch(request, context):
                yield page
        finally:
            self._watchers -= 1

    async def _watch(self, request: admin.WatchEventsRequest, context: Context) -> AsyncIterator[admin.EventPage]:
        log, kinds = self.engine.events, frozenset(request.kinds)
        last = await self.ask(context, self.engine.take_events)
        if request.cursor > last and not request.from_oldest:
            message = f"the last event is {last}, not {request.cursor} or later: that cursor is from another memory manager"
            await abort(context, Code.UNKNOWN_CURSOR, message, "cursor")
        cursor, lost = log.oldest - 1 if request.from_oldest else request.cursor or last, 0
        while not self._stopping:
            if log.cursor == cursor:
                await asyncio.sleep(_NEWS_SECONDS)
                continue
            page, cursor, lost = read_page(log, cursor, lost, kinds, self._incarnation, views.PAGE_BYTES)
            if page.events:
                yield page
            else:
                await asyncio.sleep(0)  # others have their turn
        await abort(context, Code.STOPPING, "the memory manager is stopping")

    async def CancelRequest(  # noqa: N802
        self, request: admin.CancelRequestRequest, context: Context
    ) -> admin.CancelRequestResponse:
        """End a request; its client gets CANCELLED."""
        tenant = await tenant_for(context, request.tenant)

        def cancel() -> bool:
            session = self.engine.session
            found = session.scheduler.find(tenant, request.request_id) if session else None
            if session is None or found is None:
                return False
            return session.scheduler.cancel(
                found.submission.key, EndCode.CANCELLED, "cancelled by an administrator", time.monotonic()
            )

        return admin.CancelRequestResponse(found=await self.ask(context, cancel))

    async def Verify(self, request: admin.VerifyRequest, context: Context) -> admin.VerifyResponse:  # noqa: N802
        """Check every invariant of the memory, and the executor's view against it."""
        inspection: Future[tuple[int, list[str]]] = Future()

        def verify() -> tuple[int, list[str]]:
            session = self.engine.session
            if request.with_executor:
                self.engine.inspect(inspection)
            if session is None:
                return 0, []
            try:
                return session.scheduler.check_invariants(), []
            except AssertionError as fault:
                return 1, [str(fault) or "an invariant without a name does not hold"]

        checks, faults = await self.ask(context, verify)
        if request.with_executor:
            try:
                more, seen = await asyncio.wait_for(asyncio.wrap_future(inspection), ANSWER_SECONDS)
            except TimeoutError:
                more, seen = 0, [f"the executor did not say within {ANSWER_SECONDS} seconds what it holds"]
            checks, faults = checks + more, faults + seen
        return admin.VerifyResponse(ok=not faults, checks=checks, faults=faults)


class AdminServer:
    """The server's thread. `start` returns once the port is bound."""

    def __init__(self, engine: Engine, address: Address, log: Logger) -> None:
        self._engine = engine
        self._address = address
        self._log = log
        self._bound: Future[Address] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)

    def start(self) -> Address:
        """Bind and serve; return the address with the port that was taken.

        Raises:
            StartError: the port can't be had.
        """
        self._thread.start()
        return self._bound.result(_START_SECONDS)

    def stop(self) -> None:
        """End the calls, close the port, end the thread."""
        if not self._thread.is_alive():
            return
        if not (self._bound.done() and self._bound.exception()):  # else it is ending, and its loop may be closed by now
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(2 * _GRACE_SECONDS + 1)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server(
            interceptors=[Guard(_SERVICE, self._log)],
            options=[
                ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )
        service = AdminService(self._engine)
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        for name in ("", _SERVICE):
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection(
            (_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), server
        )
        try:
            port = server.add_insecure_port(str(self._address))
            await server.start()
        except RuntimeError:
            self._bound.set_exception(
                StartError(f"--admin {self._address}: the address can't be listened on; is its port in use?")
            )
            return
        self._bound.set_result(Address(self._address.host, port))
        await self._stop.wait()
        service.stop()
        await server.stop(_GRACE_SECONDS)
        ending = asyncio.all_tasks() - {task for task in [asyncio.current_task()] if task}
        if ending:
            await asyncio.wait(ending, timeout=_GRACE_SECONDS)  # calls that have been refused, on their last lines
