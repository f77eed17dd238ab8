"""What two allocators of blocks are asked to do, and how long each takes: one side of `benchmarks.allocator`.

Knows no allocator: it drives one through `Allocator`, in a process of its own, a round at a time. The parent writes a line to
have a round done, and reads one line of JSON, operation -> microseconds; so rounds of two sides alternate. Only the standard
library is needed here, as each side runs under its own interpreter.

What is timed, on prompts of random ids that share nothing, eight in a row, for one; the median of a round's repetitions:

    admit            names (hashes) of its blocks, look-up, blocks for the whole prompt, its full blocks into the prefix cache
    admit, named     the same, where the names of the prompt's blocks are known already
    admit, cached    the same prompt once more; its blocks are cached and held by nobody
    admit, evicting  the pool is full of cached blocks: each new block takes one away
    free             the blocks of a prompt become cached
    decode           one step of many sequences: a token for each, blocks where the last is full, full blocks named and cached;
                     the mean, as each sequence fills a block in one of sixteen steps

What counts is the processor time, so that others disturb less. Making the prompt, and the object that stands for a request, is
not timed. The collector of cycles is on, and what was there when the rounds begin is frozen, as vLLM's engine does it.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
from collections.abc import Callable
from time import thread_time
from typing import Final, Generic, Protocol, TypeVar

#: Of both sides. 65,536 blocks of 16 tokens are a million tokens.
NUM_BLOCKS: Final = 65_536
BLOCK_SIZE: Final = 16
MAX_TOKENS: Final = 8_192

PROMPT_TOKENS: Final = (512, 4_096)
DECODING: Final = 256

_REPETITIONS: Final = 9
_BATCH: Final = 8  # prompts, timed together: short operations need it
_DECODE_STEPS: Final = 64  # four blocks for each sequence
_DECODE_PROMPT_TOKENS: Final = 512
_VOCAB_SIZE: Final = 50_000

_Sequence = TypeVar("_Sequence")
_Answer = TypeVar("_Answer")


class Allocator(Protocol[_Sequence]):
    """One side. A sequence is its own kind of object: a request with its tokens."""

    def sequence(self, key: str, tokens: list[int], *, named: bool) -> _Sequence:
        """Return a new sequence, the names of its full blocks computed where `named`."""

    def admit(self, sequence: _Sequence) -> int:
        """Give a sequence blocks for all of its tokens, and cache the full ones; return how many tokens were found."""

    def decode(self, sequences: list[_Sequence], token: int) -> None:
        """Do one step: compute each sequence's last token, and append the next one."""

    def free(self, sequence: _Sequence) -> None:
        """Give a sequence's blocks back."""

    def flush(self) -> None:
        """Forget what is cached."""


class Rounds(Generic[_Sequence]):
    """See the module. Both sides get the same prompts."""

    def __init__(self, allocator: Allocator[_Sequence]) -> None:
        self._allocator = allocator
        self._random = random.Random(1)  # noqa: S311 - prompts, not secrets
        self._made = 0

    def round(self) -> dict[str, float]:
        """Do everything once; return the microseconds of each operation."""
        times: dict[str, float] = {}
        for length in PROMPT_TOKENS:
            times |= self._prompts(length)
        times[f"decode, {DECODING} sequences"] = self._decode()
        times[f"admit {PROMPT_TOKENS[-1]:,}, evicting"] = self._evict(PROMPT_TOKENS[-1])
        self._allocator.flush()
        return times

    def _prompts(self, length: int) -> dict[str, float]:
        allocator, full = self._allocator, (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        times: dict[str, list[float]] = {}
        for _ in range(_REPETITIONS):
            for named in False, True:
                prompts = [self._prompt(length) for _ in range(_BATCH)]
                suffix = ", named" if named else ""
                for name in f"admit {length:,}{suffix}", f"admit {length:,}, cached{suffix}":
                    sequences = [self._sequence(prompt, named=named) for prompt in prompts]
                    found, seconds = _timed(allocator.admit, sequences)
                    assert all((one >= full) if "cached" in name else (one < BLOCK_SIZE) for one in found), (
                        f"{name}: {found} were found"
                    )
                    times.setdefault(name, []).append(seconds)
                    _, seconds = _timed(allocator.free, sequences)
                    times.setdefault(f"free {length:,}", []).append(seconds)
        return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}

    def _decode(self) -> float:
        allocator = self._allocator
        sequences = []
        for number in range(DECODING):  # their blocks are full at different steps
            sequences.append(self._sequence(self._prompt(_DECODE_PROMPT_TOKENS + number % BLOCK_SIZE), named=False))
            allocator.admit(sequences[-1])
        tokens = self._prompt(_DECODE_STEPS + 1)
        allocator.decode(sequences, tokens[0])
        seconds: list[float] = []
        for token in tokens[1:]:
            began = thread_time()
            allocator.decode(sequences, token)
            seconds.append(thread_time() - began)
        for sequence in sequences:
            allocator.free(sequence)
        return statistics.mean(seconds) * 1e6

    def _evict(self, length: int) -> float:
        allocator, seconds = self._allocator, []
        for number in range(NUM_BLOCKS * BLOCK_SIZE // length // _BATCH + _REPETITIONS):
            sequences = [self._sequence(self._prompt(length), named=False) for _ in range(_BATCH)]
            _, taken = _timed(allocator.admit, sequences)
            if number * _BATCH * length >= NUM_BLOCKS * BLOCK_SIZE:
                seconds.append(taken)
            _timed(allocator.free, sequences)
        return statistics.median(seconds) * 1e6

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(_VOCAB_SIZE), k=length)

    def _sequence(self, tokens: list[int], *, named: bool) -> _Sequence:
        self._made += 1
        return self._allocator.sequence(str(self._made), tokens, named=named)


def _timed(do: Callable[[_Sequence], _Answer], sequences: list[_Sequence]) -> tuple[list[_Answer], float]:
    """Do the same with each of some sequences; return the answers, and the seconds of one, on average."""
    began = thread_time()
    answers = [do(sequence) for sequence in sequences]
    return answers, (thread_time() - began) / len(sequences)


def serve(allocator: Allocator[_Sequence]) -> None:
    """Do a round for each line of standard input."""
    rounds = Rounds(allocator)
    rounds.round()  # warm
    gc.collect()
    gc.freeze()
    for _ in sys.stdin:
        print(json.dumps(rounds.round()), flush=True)
