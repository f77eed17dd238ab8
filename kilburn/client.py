"""The Python client: the gateway's calls and memmgr's admin calls as plain methods, for scripts, the command line and tests.

Synchronous, one channel each. A failed call raises grpc's own RpcError, untouched: its `code()` is the status, and the trailing
metadata's `kilburn-error` the reason. Messages are those of `kilburn.v1`.
"""

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from kilburn.limits import MAX_GRPC_MESSAGE_BYTES
from kilburn.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    #: A stream: an iterator of responses that is also grpc's Call (cancel, code, details, trailing_metadata).
    Responses = grpc._CallIterator[inference_pb2.GenerateResponse]

#: For calls that answer at once.
_TIMEOUT_SECONDS: Final = 30.0

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
    # What is away is tried again soon: servers of this system restart within seconds.
    ("grpc.max_reconnect_backoff_ms", 1000),
)

#: A gateway that froze or vanished is noticed though a stream is silent; ten seconds is the least that it allows.
KEEPALIVE_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class _Channel:
    """One channel to one target, and who is calling."""

    def __init__(self, target: str, tenant: str, options: tuple[tuple[str, int], ...] = ()) -> None:
        self._channel = grpc.insecure_channel(target, options=(*CHANNEL_OPTIONS, *options))
        self._metadata = (("kilburn-tenant", tenant),) if tenant else ()

    def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Client(_Channel):
    """A gateway, for one tenant (the default one where it is empty)."""

    def __init__(self, target: str, tenant: str = "") -> None:
        super().__init__(target, tenant, KEEPALIVE_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def generate(self, request: inference_pb2.GenerateRequest, timeout: float | None = None) -> "Responses":
        """Start a request and return its stream, which can be iterated and cancelled. `timeout` is its deadline in seconds."""
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)

    def generate_text(self, text: str, max_tokens: int = 0, timeout: float | None = None, **sampling: Any) -> Generator[str]:  # noqa: ANN401
        """Yield the text that follows a text, piece by piece; a generator that is closed ends the request.

        `sampling` are fields of the message Sampling.
        """
        request = inference_pb2.GenerateRequest(
            text=text,
            sampling=inference_pb2.Sampling(**sampling),
            stopping=inference_pb2.Stopping(max_tokens=max_tokens),
        )
        stream = self.generate(request, timeout)
        try:
            for response in stream:
                if response.text:
                    yield response.text
        finally:
            stream.cancel()  # whoever stops reading has no use for the rest

    def cancel(self, request_id: str) -> bool:
        """End a live request of this tenant; False where there is none."""
        call = inference_pb2.CancelCall(request_id=request_id)
        return self._stub.Cancel(call, timeout=_TIMEOUT_SECONDS, metadata=self._metadata).found

    def tokenize(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return a text's ids."""
        request = inference_pb2.TokenizeRequest(text=text, no_special_tokens=not special_tokens)
        return list(self._stub.Tokenize(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata).ids)

    def tokenize_chat(self, chat: inference_pb2.Chat) -> list[int]:
        """Return the ids of a conversation in the model's chat template."""
        request = inference_pb2.TokenizeRequest(chat=chat)
        return list(self._stub.Tokenize(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata).ids)

    def detokenize(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        request = inference_pb2.DetokenizeRequest(ids=ids, keep_special_tokens=keep_special_tokens)
        return self._stub.Detokenize(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata).text

    def model(self) -> inference_pb2.Model:
        """Return what is served."""
        return self._stub.GetModel(inference_pb2.GetModelRequest(), timeout=_TIMEOUT_SECONDS, metadata=self._metadata)


class AdminClient(_Channel):
    """A memory manager's admin API; lists that come in pages are joined, all of one instant."""

    def __init__(self, target: str, tenant: str = "") -> None:
        super().__init__(target, tenant)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def pool(self) -> admin_pb2.Pool:
        """Return the pool's counts."""
        return self._stub.GetPool(admin_pb2.GetPoolRequest(), timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def sequences(
        self,
        state: admin_pb2.SequenceState.ValueType = admin_pb2.SEQUENCE_STATE_UNSPECIFIED,
        tenant: str = "",
        tables: bool = False,
    ) -> list[admin_pb2.Sequence]:
        """Return the sequences, all or of one state or tenant, with their block tables if `tables`."""
        request = admin_pb2.ListSequencesRequest(state=state, tenant=tenant, with_block_tables=tables)
        pages = self._stub.ListSequences(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)
        return [sequence for page in pages for sequence in page.sequences]

    def sequence(self, request_id: str, index: int = 0, tenant: str = "") -> admin_pb2.Sequence:
        """Return one sequence with its whole block table."""
        request = admin_pb2.GetSequenceRequest(request_id=request_id, index=index, tenant=tenant)
        return self._stub.GetSequence(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def blocks(
        self,
        state: admin_pb2.BlockState.ValueType = admin_pb2.BLOCK_STATE_UNSPECIFIED,
        min_references: int = 0,
        first: int = 0,
        limit: int = 0,
    ) -> list[admin_pb2.Block]:
        """Return the blocks from `first` on, at most `limit` (0: all), all or of one state, with at least so many references."""
        request = admin_pb2.ListBlocksRequest(state=state, min_references=min_references, first=first, limit=limit)
        pages = self._stub.ListBlocks(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)
        return [block for page in pages for block in page.blocks]

    def prefixes(
        self, tenant: str = "", max_depth: int = 0, max_nodes: int = 0, with_tokens: bool = False
    ) -> list[admin_pb2.PrefixNode]:
        """Return the tree of cached prefixes, depth first."""
        request = admin_pb2.GetPrefixTreeRequest(tenant=tenant, max_depth=max_depth, max_nodes=max_nodes, with_tokens=with_tokens)
        pages = self._stub.GetPrefixTree(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)
        return [node for page in pages for node in page.nodes]

    def events(
        self, cursor: int = 0, from_oldest: bool = False, kinds: Sequence[admin_pb2.EventKind.ValueType] = ()
    ) -> Generator[admin_pb2.Event]:
        """Yield events after `cursor` (0: from now on), of some kinds or all, for as long as it is asked for more."""
        request = admin_pb2.WatchEventsRequest(cursor=cursor, from_oldest=from_oldest, kinds=kinds)
        stream = self._stub.WatchEvents(request, metadata=self._metadata)
        try:
            for page in stream:
                yield from page.events
        finally:
            stream.cancel()

    def explain(self, block: int) -> admin_pb2.BlockHistory:
        """Return a block and the last events that touched it, the newest first."""
        request = admin_pb2.ExplainBlockRequest(block=block)
        return self._stub.ExplainBlock(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def probe(
        self, token_ids: Sequence[int], max_tokens: int = 0, n: int = 1, tenant: str = "", cache_salt: str = ""
    ) -> admin_pb2.ProbeResponse:
        """Return what would become of a request, without making it."""
        request = admin_pb2.ProbeRequest(token_ids=token_ids, max_tokens=max_tokens, n=n, tenant=tenant, cache_salt=cache_salt)
        return self._stub.Probe(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def pin(self, token_ids: Sequence[int], ttl_seconds: float = 0.0, tenant: str = "", cache_salt: str = "") -> admin_pb2.Pin:
        """Keep what is cached of a prefix; a time of 0 is until it is unpinned."""
        request = admin_pb2.PinPrefixRequest(token_ids=token_ids, ttl_seconds=ttl_seconds, tenant=tenant, cache_salt=cache_salt)
        return self._stub.PinPrefix(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def unpin(self, pin_id: str) -> None:
        """End a pin."""
        request = admin_pb2.UnpinPrefixRequest(pin_id=pin_id)
        self._stub.UnpinPrefix(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def pins(self) -> list[admin_pb2.Pin]:
        """Return all pins."""
        return list(self._stub.ListPins(admin_pb2.ListPinsRequest(), timeout=_TIMEOUT_SECONDS, metadata=self._metadata))

    def flush(self, tenant: str = "") -> int:
        """Free what is cached and not pinned, a tenant's or all; return how many blocks."""
        request = admin_pb2.FlushPrefixCacheRequest(tenant=tenant)
        return self._stub.FlushPrefixCache(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata).flushed_blocks

    def set_quota(self, tenant: str, max_blocks: int = 0, guaranteed_blocks: int = 0, max_running: int = 0) -> admin_pb2.Quota:
        """Set a tenant's quota in place of the one before (0: no limit, nothing guaranteed); all 0 takes it away."""
        quota = admin_pb2.Quota(
            tenant=tenant, max_blocks=max_blocks, guaranteed_blocks=guaranteed_blocks, max_running=max_running
        )
        return self._stub.SetQuota(quota, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def quotas(self) -> list[admin_pb2.Quota]:
        """Return all quotas, by tenant, with what is in use."""
        return list(self._stub.ListQuotas(admin_pb2.ListQuotasRequest(), timeout=_TIMEOUT_SECONDS, metadata=self._metadata))

    def verify(self, with_executor: bool = False) -> admin_pb2.VerifyResponse:
        """Check every invariant, the executor's view against it too if `with_executor`."""
        request = admin_pb2.VerifyRequest(with_executor=with_executor)
        return self._stub.Verify(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)

    def cancel_request(self, request_id: str, tenant: str = "") -> admin_pb2.CancelRequestResponse:
        """End a request, whichever gateway it came through."""
        request = admin_pb2.CancelRequestRequest(request_id=request_id, tenant=tenant)
        return self._stub.CancelRequest(request, timeout=_TIMEOUT_SECONDS, metadata=self._metadata)
