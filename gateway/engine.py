"""The link to the memory manager: requests out, tokens in, and what becomes of the streams when it is lost.

Knows handles, the names of live requests, and whether a request would succeed now; not text or gRPC. One task moves frames
(`run`); everything else is called from the same event loop and does not wait.

A request's life here: `open` takes its name, `submit` sends it, `close` gives the name back and, where the memory manager has not
ended the request, cancels it. Every open stream gets its end: from the memory manager, or from `close`, or when the link is lost.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import zmq
import zmq.asyncio
from google.protobuf.message import Message

from gateway.errors import CallError, Code, quoted
from gateway.streams import RequestStream
from kilburn.errors import StartError
from kilburn.limits import MAX_QUEUED_FRAMES
from kilburn.log import Logger
from kilburn.v1 import engine_pb2 as wire
from kilburn.wire.link import Link

#: How often to look for a hello or heartbeat that is due, or a frame that could not be sent.
_TICK_MS: Final = 50

#: Frames read before others of the loop have their turn.
_MAX_DRAINED: Final = 64

_LOST: Final = "the memory manager was lost; try again"

_CODES: Final[dict[int, Code]] = {
    wire.ERROR_CODE_CANCELLED: Code.CANCELLED,
    wire.ERROR_CODE_DEADLINE: Code.DEADLINE,
    wire.ERROR_CODE_DUPLICATE: Code.DUPLICATE_REQUEST,
    wire.ERROR_CODE_QUEUE_FULL: Code.QUEUE_FULL,
    wire.ERROR_CODE_NEVER_FITS: Code.NEVER_FITS,
    wire.ERROR_CODE_UNAVAILABLE: Code.EXECUTOR_LOST,
}

#: For an end that says no more than its code.
_MESSAGES: Final[dict[Code, str]] = {
    Code.CANCELLED: "the request was cancelled",
    Code.DEADLINE: "the request's deadline has passed",
    Code.DUPLICATE_REQUEST: "a request of this id is live",
    Code.QUEUE_FULL: "the queue is full; try again later",
    Code.NEVER_FITS: "the request can never fit",
    Code.EXECUTOR_LOST: "the executor is not there; try again",
}


class Engine:
    """See the module.

    `fingerprint` and `tokens` are of the model folder whose tokenizer this gateway has: only the same model is served.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        link: Link,
        fingerprint: str,
        tokens: int,
        clock: Callable[[], float],
        logger: Logger,
        on_change: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._link = link
        self._fingerprint = fingerprint
        self._tokens = tokens
        self._clock = clock
        self._logger = logger
        self._on_change = on_change
        self._state: wire.ModelState | None = None  # as the peer that we are connected to says; None: it has not
        self._model: wire.ModelInfo | None = None  # the last one that was served
        self._why_not = "the memory manager is not there"
        self._losses = link.losses
        self._handles = itertools.count(1)
        self._by_name: dict[tuple[str, str], RequestStream] = {}
        self._by_handle: dict[int, RequestStream] = {}  # submitted and not ended
        self._outbox: deque[Message] = deque()

    # ------------------------------------------------------------------------------------------------ what is served

    @property
    def why_not(self) -> str:
        """Why a request would not succeed now; empty if it would."""
        return self._why_not

    @property
    def model(self) -> wire.ModelInfo | None:
        """What was served last, whether or not it is now."""
        return self._model

    def served_model(self) -> wire.ModelInfo:
        """Return what is served.

        Raises:
            CallError: nothing is, now.
        """
        if self._why_not or self._model is None:
            raise CallError(Code.NOT_SERVING, f"not serving: {self._why_not}; try again")
        return self._model

    # ----------------------------------------------------------------------------------------------------- requests

    @property
    def live(self) -> int:
        """Requests that are open."""
        return len(self._by_name)

    def open(self, stream: RequestStream) -> None:
        """Take the request's name, so that it can be cancelled from here on.

        Raises:
            CallError: a live request of this gateway has it.
        """
        name = stream.request.tenant, stream.request.request_id
        if name in self._by_name:
            raise CallError(Code.DUPLICATE_REQUEST, f"request_id: a request {quoted(name[1])} is live", "request_id")
        self._by_name[name] = stream

    def submit(self, stream: RequestStream, submit: wire.Submit) -> None:
        """Send an open request.

        Raises:
            CallError: nothing is served now, the memory manager takes nothing, or the request was cancelled since it was opened.
        """
        stream.check()
        self.served_model()
        if len(self._outbox) >= MAX_QUEUED_FRAMES:
            raise CallError(Code.QUEUE_FULL, "the memory manager is too far behind; try again later")
        stream.handle = submit.handle = next(self._handles)
        self._by_handle[stream.handle] = stream
        self._post(submit)

    def cancel(self, tenant: str, request_id: str) -> bool:
        """End a live request of this gateway; False if there is none of this name."""
        stream = self._by_name.get((tenant, request_id))
        if stream is None:
            return False
        # What memmgr ends, it says so itself: then the tokens that are under way are read first.
        if not self._cancel(stream):
            stream.fail(CallError(Code.CANCELLED, _MESSAGES[Code.CANCELLED]))
        return True

    def close(self, stream: RequestStream) -> None:
        """Give the name back; the call has ended, whatever the request has done."""
        name = stream.request.tenant, stream.request.request_id
        assert self._by_name.get(name) is stream
        del self._by_name[name]
        if self._cancel(stream):
            del self._by_handle[stream.handle]

    def end_all(self, failure: CallError) -> None:
        """Fail all open streams."""
        for stream in self._by_name.values():
            stream.fail(failure)

    # ---------------------------------------------------------------------------------------------------- the link

    async def run(self) -> None:
        """Move frames until cancelled.

        Raises:
            StartError: the memory manager refuses this gateway.
        """
        while True:
            await self._socket.poll(_TICK_MS)
            await self._drain()
            self._tend()
            await asyncio.sleep(0)  # a poll that finds frames at once does not give way

    def say_goodbye(self) -> None:
        """Tell the memory manager that this gateway stops, in order."""
        if self._link.connected:
            self._post(wire.Goodbye())

    async def _drain(self) -> None:
        for _ in range(_MAX_DRAINED):
            try:
                frame = await self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            was_connected = self._link.connected
            message = self._link.read(frame, self._clock())
            self._notice_loss()
            if self._link.refusal:
                raise StartError(f"the memory manager refuses this gateway: {self._link.refusal}")
            if self._link.connected and not was_connected:
                self._connected()
            if message is not None:
                self._act(message)

    def _tend(self) -> None:
        if self._link.connected:
            self._flush()  # before a heartbeat takes its number: numbers have to grow
        frame = self._link.due(self._clock())
        self._notice_loss()
        if frame is not None:
            self._send(frame)  # one that can't be sent is not missed: the next is due soon

    def _act(self, message: Message) -> None:
        if isinstance(message, wire.TokenBatch):
            for tokens in message.sequences:
                self._feed(tokens)
            for end in message.ends:
                self._end(end)
        elif isinstance(message, wire.ModelState):
            self._state = message
            self._judge()
        else:
            self._logger.warning("unexpected message", kind=message.DESCRIPTOR.name)

    def _feed(self, tokens: wire.SequenceTokens) -> None:
        stream = self._by_handle.get(tokens.handle)
        if stream is None:
            return  # closed; its Cancel is under way
        try:
            finish = stream.feed(tokens)
        except CallError as refusal:
            self._logger.error("tokens out of order", handle=tokens.handle, reason=refusal.message)
            self._cancel(stream)
            del self._by_handle[tokens.handle]
            stream.fail(refusal)
            return
        if finish is not None:
            self._post(finish)

    def _end(self, end: wire.RequestEnd) -> None:
        stream = self._by_handle.pop(end.handle, None)
        if stream is None:
            return
        if end.error == wire.ERROR_CODE_OK:
            stream.end(end)
            return
        code = _CODES.get(end.error)
        if code is None:
            self._logger.error("request refused as malformed", handle=end.handle, reason=end.message)
            stream.fail(CallError(Code.INTERNAL, "the memory manager did not understand the request"))
        else:
            stream.fail(CallError(code, end.message or _MESSAGES[code]))

    def _cancel(self, stream: RequestStream) -> bool:
        """Send a Cancel if the memory manager still has the request; return whether it has."""
        if self._by_handle.get(stream.handle) is not stream:
            return False
        self._post(wire.Cancel(handle=stream.handle))
        return True

    def _connected(self) -> None:
        self._logger.info("connected to the memory manager", incarnation=f"{self._link.peer:016x}")
        self._judge()

    def _notice_loss(self) -> None:
        if self._link.losses == self._losses:
            return
        self._losses = self._link.losses
        if self._link.left:
            self._logger.info("the memory manager has left", open_requests=self.live)
        else:
            self._logger.warning("lost the memory manager", open_requests=self.live)
        self._by_handle.clear()  # a memory manager that was silent only ends them itself at our next hello
        self._outbox.clear()
        self._state = None
        self.end_all(CallError(Code.MEMMGR_LOST, _LOST))
        self._judge()

    def _judge(self) -> None:
        """Find out anew whether a request would succeed, and say so if that has changed."""
        before = self._why_not
        self._why_not = self._reason_not_to_serve()
        if self._why_not != before:
            self._on_change()

    def _reason_not_to_serve(self) -> str:
        if not self._link.connected:
            return "the memory manager is not there"
        state = self._state
        if state is None:
            return "the memory manager has not said yet what it serves"
        if not state.serving or not state.HasField("model"):
            return state.reason or "there is no executor"
        model = state.model
        if model.fingerprint != self._fingerprint:
            return f"the executor has another model ({quoted(model.name)}) than this gateway's tokenizer"
        if model.vocab_size < self._tokens:
            return f"the tokenizer has {self._tokens} tokens, and the model only {model.vocab_size}"
        self._model = model
        return ""

    # ------------------------------------------------------------------------------------------------------ sending

    def _post(self, body: Message) -> None:
        """Send in order; what the socket does not take now is sent with a later tick."""
        self._outbox.append(body)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._send(self._link.seal(self._outbox[0], self._clock())):
            self._outbox.popleft()

    def _send(self, frame: bytes) -> bool:
        # Without waiting, the future that the asyncio socket returns is done already.
        sent = cast("asyncio.Future[None]", self._socket.send(frame, zmq.NOBLOCK))
        try:
            sent.result()
        except zmq.Again:
            return False
        return True
