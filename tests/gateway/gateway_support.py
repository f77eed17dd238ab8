"""What the gateway's tests share: small real tokenizers, and the memory manager's side of the protocol over a real socket.

`Peer` is no stand-in for memmgr: it says what a test tells it to say and notes what it hears, so that each test decides what the
gateway has to deal with.
"""

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
import zmq
from google.protobuf.message import Message
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gateway.service import Gateway
from kilburn import log
from kilburn.config import Address, GatewayConfig, LogConfig
from kilburn.limits import HEARTBEAT_INTERVAL_SECONDS
from kilburn.models import fingerprint
from kilburn.v1 import engine_pb2 as wire
from kilburn.v1 import inference_pb2 as api
from kilburn.v1 import inference_pb2_grpc
from kilburn.wire.envelope import new_incarnation
from kilburn.wire.hub import Hub, Incoming

# A shared machine's pauses are no fault of the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

MessageT = TypeVar("MessageT", bound=Message)

VOCAB_SIZE = 400
CONTEXT_LENGTH = 64
END = "<|end|>"
CORPUS = (
    "The capital of France is Paris. The capital of Italy is Rome.",
    "Once upon a time, there was a kiln. It burned; the memory held.",
    "naïve café, 東京都, สวัสดี, Привет, 👩‍👩‍👧 and 😀!",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots here: ロボット') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer (GPT-2's kind), trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[END, "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer of Llama 2's kind: byte tokens, spaces written as ▁, the first one stripped."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)]:
        vocabulary[token] = len(vocabulary)
    for token in ["▁", "a", "b", "▁a", "▁b", "▁▁", "é", "▁the", "東", "\N{REPLACEMENT CHARACTER}"]:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("tool call", special=False)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer whose decoder turns ▁ into spaces token by token, and drops the first one."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "▁", "▁a", "a", "▁b", "b", "▁▁", "▁a▁b", "é"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """Return a tokenizer of BERT's kind: ## glues, spaces go between, punctuation is cleaned up."""
    words = ["[UNK]", "[SEP]", "the", "kiln", "##s", "##ing", ".", ",", "don", "'", "t", "n't"]
    tokenizer = Tokenizer(models.WordPiece({token: number for number, token in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def write_model(folder: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Path:
    """Write what the gateway reads of a model folder: a tokenizer and the configs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE, **(config or {})}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def model_info(folder: Path, vocab_size: int = VOCAB_SIZE) -> wire.ModelInfo:
    """Return what an executor with this model would say."""
    return wire.ModelInfo(
        name="kiln",
        fingerprint=fingerprint(folder),
        context_length=CONTEXT_LENGTH,
        vocab_size=vocab_size,
        block_size=16,
        total_blocks=32,
        dtype="float32",
        device="cpu",
        attention_backend="reference",
    )


class Peer:
    """The memory manager's side of the protocol, as far as a test drives it."""

    def __init__(self, endpoint: str, state: wire.ModelState | None = None, refusal: str = "") -> None:
        self.state = state
        self.refusal = refusal
        self.frozen = False
        self.heard: list[Message] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hub = Hub(self._context, endpoint, new_incarnation())
        self._news = asyncio.Event()
        self._taken = 0
        self._task = asyncio.create_task(self._run())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Go away without a word, as a killed process does."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._hub.socket.setsockopt(zmq.LINGER, 0)
        self._hub.close()
        self._context.term()

    def send(self, body: Message) -> None:
        """Send to every gateway."""
        for incarnation in list(self._hub.peers):
            self._hub.send(incarnation, body)

    def set_state(self, state: wire.ModelState) -> None:
        """Say what is served from now on."""
        self.state = state
        self.send(state)

    async def next(self, kind: type[MessageT], seconds: float = 20.0) -> MessageT:
        """Wait for the next message of a kind; those before it are skipped."""
        async with asyncio.timeout(seconds):
            while True:
                while self._taken < len(self.heard):
                    message = self.heard[self._taken]
                    self._taken += 1
                    if isinstance(message, kind):
                        return message
                self._news.clear()
                await self._news.wait()

    def tokens(
        self,
        handle: int,
        ids: Sequence[int],
        offset: int = 0,
        finish: api.FinishReason.ValueType = api.FINISH_REASON_UNSPECIFIED,
        end: bool = False,
        logprobs: Sequence[api.TokenLogprob] = (),
        cached_tokens: int = 0,
    ) -> None:
        """Send tokens of one request, with its end in the same message if `end`."""
        tokens = wire.SequenceTokens(handle=handle, offset=offset, token_ids=ids, finish_reason=finish, logprobs=logprobs)
        ends = [wire.RequestEnd(handle=handle, cached_tokens=cached_tokens)] if end else []
        self.send(wire.TokenBatch(sequences=[tokens], ends=ends))

    def end(self, handle: int, error: wire.ErrorCode.ValueType = wire.ERROR_CODE_OK, message: str = "") -> None:
        """End one request."""
        self.send(wire.TokenBatch(ends=[wire.RequestEnd(handle=handle, error=error, message=message)]))

    async def _run(self) -> None:
        beat = 0.0
        while True:
            if not self.frozen:
                for incoming in self._hub.drain():
                    if incoming.is_hello:
                        self._greet(incoming)
                    elif not isinstance(incoming.body, wire.Heartbeat):
                        self.heard.append(incoming.body)
                        self._news.set()
                if time.monotonic() - beat > HEARTBEAT_INTERVAL_SECONDS:
                    beat = time.monotonic()
                    self.send(wire.Heartbeat())
            await asyncio.sleep(0.002)

    def _greet(self, incoming: Incoming) -> None:
        if self.refusal:
            self._hub.refuse(incoming, self.refusal)
        elif self._hub.welcome(incoming):
            self.heard.append(incoming.body)
            self._news.set()
            if self.state is not None:
                self._hub.send(incoming.incarnation, self.state)


class Running:
    """One gateway, its peer, and a client."""

    def __init__(self, folder: Path, config: GatewayConfig, gateway: Gateway, peer: Peer, channel: grpc.aio.Channel) -> None:
        self.folder = folder
        self.config = config
        self.gateway = gateway
        self.peer = peer
        self.channel = channel
        self.stub: Any = inference_pb2_grpc.InferenceStub(channel)

    def encode(self, text: str) -> list[int]:
        """Return a text's ids."""
        assert self.gateway._inference.backend is not None
        return self.gateway._inference.backend.text.tokenizer.encode(text)

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait for something to become true."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    @property
    def live(self) -> int:
        """Requests that the gateway holds."""
        backend = self.gateway._inference.backend
        return backend.engine.live if backend else 0

    @property
    def serving(self) -> bool:
        """Whether the gateway would take a request."""
        backend = self.gateway._inference.backend
        return backend is not None and not backend.engine.why_not


def gateway_config(runtime_dir: Path, model: Path | str) -> GatewayConfig:
    """Return the configuration of a gateway on a free port."""
    return GatewayConfig(
        runtime_dir=runtime_dir,
        gateway_endpoint=f"ipc://{runtime_dir}/gateway.sock",
        listen=Address("127.0.0.1", 0),
        model=str(model),
    )


@asynccontextmanager
async def running(folder: Path, runtime_dir: Path, drain_seconds: float = 0.5) -> AsyncIterator[Running]:
    """Run a gateway and a peer that serves its model, both in this event loop."""
    config = gateway_config(runtime_dir, folder)
    gateway = Gateway(config, log.configure(LogConfig(level="error"), "gateway"), drain_seconds)
    serving = asyncio.create_task(gateway.serve())
    peer = Peer(config.gateway_endpoint, wire.ModelState(serving=True, model=model_info(folder)))
    found: Running | None = None
    try:
        async with asyncio.timeout(20):
            while gateway.address is None and not serving.done():
                await asyncio.sleep(0.005)
        async with grpc.aio.insecure_channel(str(gateway.address)) as channel:
            found = Running(folder, config, gateway, peer, channel)
            await found.until(lambda: serving.done() or (found is not None and found.serving), 60)
            yield found
    finally:
        gateway.stop()
        await asyncio.wait_for(serving, 20)
        await (found.peer if found else peer).close()  # a test may have put another in its place


def error_code(error: grpc.aio.AioRpcError) -> str:
    """Return the stable code in a failed call's trailing metadata."""
    pairs: Any = error.trailing_metadata() or ()
    return next((value for key, value in pairs if key == "kilburn-error"), "")
