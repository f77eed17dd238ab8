"""One system under measurement, in a process of its own and under its own interpreter: what its program and `systems` say.

The program gets the model's folder, the threads and what `systems` adds to its command line. It loads, says who it is in one line
of JSON, and then answers each line with a line: prompts (token ids) and how many output tokens each of them gets, by the seconds
from the first request to the last token, and what came out. Whether that is what was asked for is checked here, for all systems
alike. The end of standard input ends the program. Only the standard library is needed here.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

#: The default model at its context's beginning; a peer reserves memory for so many tokens of a sequence.
MAX_TOKENS: Final = 2048

#: Requests at once, at most.
MAX_REQUESTS: Final = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought. The last two are known of Kilburn alone."""

    ids: list[int]
    first_seconds: float | None = None  # from its submission to its first token, at the client
    cached: int | None = None  # prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class About:
    """Who it is: the system's version, and how it computes, for people."""

    version: str
    how: str


class Engine(Protocol):
    """A system that has loaded its model."""

    def about(self) -> About:
        """Say who it is."""

    def prepare(self, prompts: Sequence[Sequence[int]], outputs: int) -> Callable[[], list[Answer]]:
        """Return what does the requests, all at once, greedily, past ends of sequence; only its call is timed."""


def answers() -> TextIO:
    """Return where answers go: standard output. Whatever else is printed from now on goes to standard error."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def serve(engine: Engine, vocab_size: int, to: TextIO) -> None:
    """Answer until standard input ends."""
    _say(to, asdict(engine.about()))
    for line in sys.stdin:
        try:
            answer = _answer(engine, vocab_size, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(to, answer)


def _answer(engine: Engine, vocab_size: int, question: dict[str, Any]) -> dict[str, object]:
    prompts, outputs = question["prompts"], question["outputs"]
    run = engine.prepare(prompts, outputs)
    began = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - began
    check(found, len(prompts), outputs, vocab_size)
    return {"seconds": seconds, "answers": [asdict(one) for one in found]}


def check(found: Sequence[Answer], requests: int, outputs: int, vocab_size: int) -> None:
    """Insist that every request got exactly its tokens.

    Raises:
        ValueError: it did not.
    """
    counts = [len(one.ids) for one in found]
    if counts != [outputs] * requests:
        raise ValueError(f"{requests} times {outputs} tokens were asked for, and {counts} came")
    if not all(0 <= token < vocab_size for one in found for token in one.ids):
        raise ValueError("a token came that is none of the model's")


def vocab_size(model: Path) -> int:
    """Return how many tokens a model knows."""
    return int(json.loads((model / "config.json").read_bytes())["vocab_size"])


def _say(to: TextIO, what: dict[str, object]) -> None:
    print(json.dumps(what), file=to, flush=True)
