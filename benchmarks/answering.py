"""The two other ends of the memory manager, without a model: what is left is what the memory manager does itself.

An executor that answers each plan at once, and a gateway that keeps so many requests running. Both speak engine.proto over the
real sockets. Knows nothing of memory.
"""

import time
from abc import ABC, abstractmethod
from typing import Final

import zmq
from google.protobuf.message import Message

from kilburn.limits import PROTOCOL
from kilburn.v1 import engine_pb2 as engine
from kilburn.wire.envelope import new_incarnation
from kilburn.wire.link import Link
from kilburn.wire.sockets import dealer

Context = zmq.Context[zmq.Socket[bytes]]

VOCABULARY: Final = 1 << 16

#: How long to sleep where nothing comes, in milliseconds: a hello or a heartbeat may be due.
_POLL_MS: Final = 20


class Peer(ABC):
    """One connection. Used by one thread."""

    def __init__(self, context: Context, endpoint: str, hello: engine.GatewayHello | engine.ExecutorHello) -> None:
        self._link = Link(new_incarnation(), hello)
        self._socket = dealer(context.socket(zmq.DEALER), endpoint)

    @property
    def connected(self) -> bool:
        """Whether the memory manager has welcomed it."""
        return self._link.connected

    def send(self, body: Message) -> None:
        """Send a message to the memory manager."""
        self._socket.send(self._link.seal(body, time.monotonic()))

    def listen(self) -> None:
        """Act on what has come, or wait a moment for something."""
        due = self._link.due(time.monotonic())
        if due is not None:
            self._socket.send(due)
        if not self._socket.poll(_POLL_MS):
            return
        message = self._link.read(self._socket.recv(), time.monotonic())
        if message is not None:
            self.take(message)

    @abstractmethod
    def take(self, message: Message) -> None:
        """Act on a message."""

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


class AnsweringExecutor(Peer):
    """Answers each plan at once, and knows when it did: `answered` are monotonic seconds, one a step."""

    def __init__(self, context: Context, endpoint: str, blocks: int, block_size: int, slots: int) -> None:
        self.answered: list[float] = []
        model = engine.ModelInfo(
            name="none",
            fingerprint="0" * 64,
            context_length=min(blocks * block_size, 1 << 17),
            vocab_size=VOCABULARY,
            block_size=block_size,
            total_blocks=blocks,
            bytes_per_block=block_size,
            dtype="float32",
            device="cuda:0",  # the budget of a step is a GPU's
            attention_backend="none",
        )
        super().__init__(
            context,
            endpoint,
            engine.ExecutorHello(protocol=PROTOCOL, model=model, max_slots=slots, max_step_tokens=1 << 14),
        )

    def take(self, message: Message) -> None:
        """Answer a plan: each sample is the number of its output."""
        if isinstance(message, engine.StepPlan):
            tokens = [sample.position % VOCABULARY for sample in message.samples]
            self.send(engine.StepResult(step=message.step, token_ids=tokens))
            self.answered.append(time.monotonic())


class KeepingGateway(Peer):
    """Keeps `requests` requests running, each of a prompt of its own."""

    def __init__(self, context: Context, endpoint: str, requests: int, prompt: int, outputs: int) -> None:
        super().__init__(context, endpoint, engine.GatewayHello(protocol=PROTOCOL, model_fingerprint="0" * 64))
        self._requests, self._prompt, self._outputs = requests, prompt, outputs
        self._handles = 0
        self.refused = ""

    def take(self, message: Message) -> None:
        """Begin where something is served, and put a new request in the place of each that ends."""
        if isinstance(message, engine.ModelState) and message.serving:
            for _ in range(self._requests):
                self._submit()
        elif isinstance(message, engine.TokenBatch):
            for end in message.ends:
                if end.error:
                    self.refused = end.message
                self._submit()

    def _submit(self) -> None:
        self._handles += 1
        first = self._handles * 7919
        self.send(
            engine.Submit(
                handle=self._handles,
                tenant="default",
                request_id=f"request-{self._handles}",
                prompt_ids=[(first + at * at) % VOCABULARY for at in range(self._prompt)],
                sampling=engine.SamplingParams(top_p=1),
                max_tokens=self._outputs,
                samples=1,
            )
        )
