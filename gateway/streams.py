"""One object for each live request: between the engine, which feeds it, and the call, which reads it.

Knows what the engine said of the request and what the client has had; not sockets or gRPC. It is bounded without a queue: tokens
are gathered, not messages, so a client that does not read costs four bytes a token and its text (with log-probabilities some 250
bytes a token more), and gets all of it in few messages later. A stop string is found when its token comes, whether the client
reads or not.

Each message carries the text that its tokens made certain, so the text up to an offset depends on the ids up to there alone.
Each index has one message with a finish reason, its last; the stream's last message has the usage, so the last index's finish
waits for the engine's word that the request has ended.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from gateway.errors import CallError, Code
from gateway.text import Decoding, OutputText
from gateway.validate import Checked
from kilburn.v1 import engine_pb2 as wire
from kilburn.v1 import inference_pb2 as api

#: Of one message, so that it stays well below the gRPC limit: with 20 alternatives a token's log-probabilities are some 250
#: bytes, and a character has at most 4.
_MAX_MESSAGE_TOKENS: Final = 2048
_MAX_MESSAGE_CHARACTERS: Final = 256 * 1024


class IndexOutput:
    """What one index has produced, and what of it is not sent yet."""

    def __init__(self, text: OutputText, include_stop: bool) -> None:
        self.finish: api.FinishReason.ValueType = api.FINISH_REASON_UNSPECIFIED
        self.finish_sent = False
        self.stop_match = ""
        self.score = 0.0  # a beam's
        self.produced = 0  # tokens, sent or not
        self.echo = ""  # goes before everything else
        self._text = text
        self._include_stop = include_stop
        self._sent = 0
        # Not sent: tokens, the characters that each made certain, the characters, the serialized log-probabilities.
        self._ids = array("I")
        self._lengths = array("I")
        self._pieces: list[str] = []
        self._logprobs: list[bytes] = []
        self._prompt_logprobs: list[bytes] = []
        self._tail = ""  # text that no token but the end made certain

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens to send."""
        return bool(self._ids)

    def feed(self, tokens: wire.SequenceTokens) -> bool:
        """Take tokens in; return True if a stop string ended the index by them, which the engine does not know."""
        self._prompt_logprobs += [logprob.SerializeToString() for logprob in tokens.prompt_logprobs]
        if self.finish:
            return False
        self.score = tokens.score
        ends_by_token = tokens.finish_reason == api.FINISH_REASON_EOS
        last = len(tokens.token_ids) - 1
        for number, token in enumerate(tokens.token_ids):
            logprob = tokens.logprobs[number] if tokens.logprobs else None
            if ends_by_token and number == last:
                self._end_with(token, logprob)
                return False
            text, match = self._text.push(token)
            self._append(token, text, logprob)
            if match:
                self._stop(match)
                return True
        if tokens.finish_reason:
            self._end(tokens.finish_reason)
        return False

    def fill(self, response: api.GenerateResponse, may_finish: bool) -> None:
        """Move what is not sent into a message, as much as one may carry; the finish too, if it may go and nothing is left."""
        response.offset = self._sent
        if self.echo:
            response.text, self.echo = self.echo[:_MAX_MESSAGE_CHARACTERS], self.echo[_MAX_MESSAGE_CHARACTERS:]
        if self._prompt_logprobs:
            for serialized in self._prompt_logprobs[:_MAX_MESSAGE_TOKENS]:
                response.prompt_logprobs.add().MergeFromString(serialized)
            del self._prompt_logprobs[:_MAX_MESSAGE_TOKENS]
        if response.text or response.prompt_logprobs:
            return
        count, characters = self._measure()
        text = "".join(self._pieces)
        response.text = text[:characters]
        response.token_ids.extend(self._ids[:count])
        for serialized in self._logprobs[:count]:
            response.logprobs.add().MergeFromString(serialized)
        del self._ids[:count], self._lengths[:count], self._logprobs[:count]
        self._pieces = [text[characters:]] if characters < len(text) else []
        self._sent += count
        if self.finish and may_finish and not self._ids:
            response.text += self._tail
            response.finish_reason = self.finish
            response.stop_match = self.stop_match
            response.score = self.score
            self._tail = ""
            self.finish_sent = True

    def _measure(self) -> tuple[int, int]:
        """Return how many tokens the next message takes, and their characters; one token at least."""
        count = characters = 0
        for length in self._lengths:
            if count == _MAX_MESSAGE_TOKENS or (count and characters + length > _MAX_MESSAGE_CHARACTERS):
                break
            count += 1
            characters += length
        return count, characters

    def _append(self, token: int, text: str, logprob: api.TokenLogprob | None) -> None:
        self.produced += 1
        self._ids.append(token)
        self._lengths.append(len(text))
        if text:
            self._pieces.append(text)
        if logprob is not None:
            # A part of a parsed message keeps the whole message alive.
            self._logprobs.append(logprob.SerializeToString())

    def _stop(self, match: str) -> None:
        self.finish = api.FINISH_REASON_STOP
        self.stop_match = match

    def _end_with(self, token: int, logprob: api.TokenLogprob | None) -> None:
        """End by a stop token: it counts, and its text is given only if that is wanted."""
        if self._include_stop:
            self._append(token, self._text.finish_with(token), logprob)
            self.finish = api.FINISH_REASON_EOS
        else:
            self._append(token, "", logprob)
            self._end(api.FINISH_REASON_EOS)

    def _end(self, reason: api.FinishReason.ValueType) -> None:
        self._tail, match = self._text.finish()
        if match:
            self._stop(match)
        else:
            self.finish = reason


class RequestStream:
    """See the module. Used by one event loop; times are seconds of one monotonic clock."""

    def __init__(self, request: Checked, decoding: Decoding, arrived: float, clock: Callable[[], float]) -> None:
        self.request = request
        self.handle = 0  # the engine's name for it, once submitted
        self._outputs = [
            IndexOutput(
                OutputText(decoding, request.stopping.stop, request.stopping.include_stop, request.stopping.min_tokens),
                request.stopping.include_stop,
            )
            for _ in range(request.samples)
        ]
        self._clock = clock
        self._arrived = arrived
        self._first_token: float | None = None
        self._prompt_tokens = 0
        self._end: wire.RequestEnd | None = None
        self._failure: CallError | None = None
        self._done = False
        self._changed = asyncio.Event()

    def begin(self, prompt_tokens: int, echo: str) -> None:
        """Note the prompt; `echo` is sent before the first tokens, and not before the engine has taken the request."""
        self._prompt_tokens = prompt_tokens
        for output in self._outputs:
            output.echo = echo

    def feed(self, tokens: wire.SequenceTokens) -> wire.Finish | None:
        """Take tokens in; return what the engine must be told if a stop string ended their index.

        Raises:
            CallError: they do not follow on what was there, which is the engine's fault.
        """
        if tokens.index >= len(self._outputs) or (tokens.logprobs and len(tokens.logprobs) != len(tokens.token_ids)):
            raise CallError(Code.INTERNAL, "the memory manager sent tokens that are none of this request's")
        output = self._outputs[tokens.index]
        if not output.finish and tokens.offset != output.produced:
            raise CallError(Code.INTERNAL, f"tokens from offset {tokens.offset} came where {output.produced} were expected")
        if self._first_token is None and tokens.token_ids:
            self._first_token = self._clock()
        stopped = output.feed(tokens)
        self._changed.set()
        return wire.Finish(handle=self.handle, index=tokens.index, output_tokens=output.produced) if stopped else None

    def end(self, end: wire.RequestEnd) -> None:
        """The engine has ended the request, and ended all of its indexes before."""
        unfinished = [number for number, output in enumerate(self._outputs) if not output.finish]
        if unfinished:
            self.fail(CallError(Code.INTERNAL, f"the request ended, and index {unfinished[0]} did not"))
            return
        self._end = end
        self._changed.set()

    def fail(self, failure: CallError) -> None:
        """End the stream with an error, once the tokens that are here were read. The first failure stands."""
        if self._failure is None and self._end is None:
            self._failure = failure
            self._changed.set()

    def check(self) -> None:
        """Raise what has failed the stream, if anything has."""
        if self._failure is not None:
            raise self._failure

    async def next(self) -> api.GenerateResponse | None:
        """Wait for the next message; None after the last.

        Raises:
            CallError: the request was ended by an error.
        """
        while not self._done:
            response = self.take()
            if response is not None:
                return response
            self.check()
            self._changed.clear()
            await self._changed.wait()
        return None

    def take(self) -> api.GenerateResponse | None:
        """Return the next message, if there is anything for one."""
        index = self._ready_index()
        if index is None:
            return None
        response = api.GenerateResponse(request_id=self.request.request_id, index=index)
        self._outputs[index].fill(response, self._may_finish(index))
        if all(output.finish_sent for output in self._outputs):
            self._fill_usage(response.usage)
            self._done = True
        return response

    def _ready_index(self) -> int | None:
        for index, output in enumerate(self._outputs):
            if output.has_tokens or (output.finish and not output.finish_sent and self._may_finish(index)):
                return index
        return None

    def _may_finish(self, index: int) -> bool:
        """Whether the index's last message may go: the stream's last one has to know the request's end."""
        others: Sequence[bool] = [output.finish_sent for number, output in enumerate(self._outputs) if number != index]
        return self._end is not None or not all(others)

    def _fill_usage(self, usage: api.Usage) -> None:
        assert self._end is not None
        now = self._clock()
        usage.prompt_tokens = self._prompt_tokens
        usage.completion_tokens = sum(output.produced for output in self._outputs)
        usage.cached_tokens = self._end.cached_tokens
        usage.preemptions = self._end.preemptions
        usage.queue_seconds = self._end.queue_seconds
        usage.first_token_seconds = (self._first_token if self._first_token is not None else now) - self._arrived
        usage.total_seconds = now - self._arrived
