"""The values that go into the scheduler and come out of it. Nobody changes one.

Those of which a step has one for each sequence are not `frozen`: making a frozen one takes four times as long.

`sampling`, `logprob` and what is told of a prompt are carried through unread: they are the executor's and the client's.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from memmgr.core.table import StepMemory
from memmgr.schedule.beams import Choice

#: Names a request for good: its gateway's incarnation, and the gateway's handle.
RequestKey = tuple[int, int]


class FinishReason(IntEnum):
    """Why a sequence's output is complete; the numbers of inference.proto."""

    EOS = 1
    STOP = 2
    LENGTH = 3
    CONTEXT = 4
    ERROR = 5


class EndCode(IntEnum):
    """How a request as a whole ended; the numbers of engine.proto."""

    OK = 0
    CANCELLED = 1
    DEADLINE = 2
    DUPLICATE = 3
    QUEUE_FULL = 4
    NEVER_FITS = 5
    UNAVAILABLE = 6
    INVALID = 7


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the scheduler. `context_length` in tokens, prompt and output; `max_step_tokens` is the budget of one step.

    One step may tell of `max_prompt_rows` prompt tokens. The histories that one plan carries are of `max_history_tokens` at the
    most, beside those of one request: three bytes each at the most, so that a plan stays well within a frame.
    """

    max_running: int
    max_waiting: int
    max_step_tokens: int
    context_length: int
    max_prompt_rows: int = 128
    max_history_tokens: int = 1024 * 1024

    def __post_init__(self) -> None:
        assert self.max_step_tokens >= self.max_running >= 1, "a step must hold one token of each running sequence"


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it came. `prompt` has at least one id; `max_tokens` 0: up to the context length.

    `samples` sequences are returned, from 1. Where `beam_width` is above 1 they are the best that a beam search of that width
    finds, and each of their tokens is told of with `alternatives` (None: with nothing).
    `prompt_alternatives`: tell of the prompt's tokens, each with so many (None: tell of none).

    `counts_tokens`: the executor has to know which tokens a sequence has had, those of the prompt by `prompt_seen`, which is
    empty where only outputs count.
    """

    key: RequestKey
    tenant: str
    request_id: str
    prompt: array[int]
    sampling: Any
    max_tokens: int
    stop_token_ids: frozenset[int]
    samples: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    alternatives: int | None = None
    prompt_alternatives: int | None = None
    counts_tokens: bool = False
    prompt_seen: bytes = b""
    priority: int = 0
    salt: str = ""
    deadline: float = float("inf")  # on the same clock as every `now`

    @property
    def width(self) -> int:
        """How many sequences run side by side."""
        return self.beam_width if self.beam_width > 1 else self.samples


@dataclass(slots=True)
class PlannedChunk:
    """Tokens of one sequence that a step computes: positions start .. start + count - 1.

    `tokens` is None for the one token that this slot sampled last. `new_blocks` go to the end of the slot's table, `edits` are
    (logical, block) of entries that were replaced.
    """

    slot: int
    start: int
    count: int
    tokens: array[int] | None
    new_blocks: tuple[int, ...]
    edits: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class PlannedSample:
    """Sample from the last row of chunk `chunk`, for output number `position` of the sequence in `slot`.

    Where `choices` is not 0 nothing is drawn: the so many most likely tokens are told, each with `alternatives` where that is not
    None.
    """

    chunk: int
    slot: int
    position: int
    choices: int = 0
    alternatives: int | None = None


@dataclass(slots=True)
class PlannedTelling:
    """Tell of prompt tokens `targets`: they were to come after the rows of chunk `chunk` from `first` on."""

    chunk: int
    first: int
    targets: array[int]
    alternatives: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `opens` are (slot, sampling, index among the request's sequences).

    `histories` are (slot, prompt_seen of its submission, outputs so far), of those opened whose tokens count.
    """

    step: int
    memory: StepMemory
    closes: tuple[int, ...]
    opens: tuple[tuple[int, object, int], ...]
    chunks: tuple[PlannedChunk, ...]
    samples: tuple[PlannedSample, ...]
    histories: tuple[tuple[int, bytes, array[int]], ...] = ()
    tellings: tuple[PlannedTelling, ...] = ()


@dataclass(slots=True)
class Sampled:
    """What became of one planned sample. `failed`: its logits were not numbers, there is no token, and there are no choices."""

    token: int
    failed: bool = False
    logprob: Any = None
    choices: tuple[Choice, ...] = ()  # the most likely first


@dataclass(slots=True)
class NewToken:
    """One token for the client: output number `offset` of the request's sequence `index`."""

    key: RequestKey
    index: int
    offset: int
    token: int
    logprob: Any


@dataclass(slots=True)
class PromptTold:
    """What the client asked to know of the prompt's next tokens, the second first: before the first token of any sequence."""

    key: RequestKey
    logprobs: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """A sequence's output is complete after `output_tokens` tokens. `score` is a beam's."""

    key: RequestKey
    index: int
    output_tokens: int
    reason: FinishReason
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The last word on a request; every submission gets exactly one."""

    key: RequestKey
    code: EndCode
    message: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0


Event = NewToken | PromptTold | SequenceEnd | RequestEnd
