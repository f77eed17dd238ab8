"""llama.cpp's side of `benchmarks.peers`: all sequences in one batch, through llama-cpp-python, from a bf16 GGUF.

Runs under an interpreter that has llama-cpp-python, gguf and numpy, which needs nothing of Kilburn but this folder. Written for
and measured with llama-cpp-python 0.3.36. The GGUF is made of the model's own weights first (`gguf_file`).

The requests of a case begin together and are equally long: one decode for all prompts, then one for each further token of all
sequences. Each sequence has a cache of its own (kv_unified off), else each of them would be compared with the keys of all. The
most likely token is found with numpy: llama.cpp's sampler copies the whole vocabulary for each token.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: In place of this folder, and gone again before anything else is imported: no module of ours is to be found under a name that a
#: package of the peer looks for.
_ROOT: Final = str(Path(__file__).resolve().parents[2])
sys.path[0] = _ROOT
from benchmarks.peers.gguf_file import write_gguf  # noqa: E402
from benchmarks.peers.worker import About, Answer, answers, serve, vocab_size  # noqa: E402

sys.path.remove(_ROOT)

#: Tokens that are computed at once, llama.cpp's default.
_UBATCH: Final = 512

#: llama.cpp's log: warnings and errors.
_WARNING: Final = 3


class LlamaError(Exception):
    """llama.cpp did not do something, and it has written why."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A llama_batch, and what changes in it as arrays over its memory."""

    batch: Any
    tokens: Any  # [n] int32
    positions: Any  # [n] int32


class Llama:
    """An Engine."""

    def __init__(self, gguf: Path, threads: int, vocab_size: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._threads = threads
        self._vocab_size = vocab_size
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise LlamaError("the model can't be loaded")
        #: One for each shape of a case: a new one's memory would be touched for the first time while it is measured.
        self._contexts: dict[tuple[int, int], Any] = {}

    def about(self) -> About:
        """See Engine."""
        words = self._api.llama_print_system_info().decode().split("|")
        has = [name.strip().removesuffix(" = 1") for name in words if name.strip().endswith("= 1")]
        return About(self._api.__version__, f"llama_decode, a sequence id for each request, bf16 GGUF; {' '.join(has)}")

    def prepare(self, prompts: Sequence[Sequence[int]], outputs: int) -> Callable[[], list[Answer]]:
        """See Engine. All prompts are equally long."""
        count, length = len(prompts), len(prompts[0])
        assert all(len(prompt) == length for prompt in prompts)
        context = self._context(count, length + outputs)
        first = self._batch(count, length, 0)
        first.tokens[:] = [token for prompt in prompts for token in prompt]
        later = self._batch(count, 1, length)

        def run() -> list[Answer]:
            found = [self._step(context, first, count)]
            for _ in range(outputs - 1):
                later.tokens[:] = found[-1]
                found.append(self._step(context, later, count))
                later.positions[:] += 1
            return [Answer([int(tokens[number]) for tokens in found]) for number in range(count)]

        return run

    def _step(self, context: Any, batch: _Batch, count: int) -> Any:  # noqa: ANN401 - a context, and an array
        """Compute a batch; return the most likely token of each sequence, [count]."""
        import numpy as np

        status = self._api.llama_decode(context, batch.batch)
        if status != 0:
            raise LlamaError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(context), shape=(count, self._vocab_size))
        return logits.argmax(axis=1)

    def _batch(self, count: int, length: int, position: int) -> _Batch:
        """Return a batch of `length` tokens for each of `count` sequences; logits are of the last of each."""
        import numpy as np

        batch = self._api.llama_batch_init(count * length, 0, 1)
        batch.n_tokens = count * length
        tokens, positions = (np.ctypeslib.as_array(pointer, shape=(count * length,)) for pointer in (batch.token, batch.pos))
        positions[:] = np.tile(np.arange(position, position + length), count)
        for at in range(count * length):
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = at // length
            batch.logits[at] = (at + 1) % length == 0
        return _Batch(batch, tokens, positions)

    def _context(self, count: int, tokens: int) -> Any:  # noqa: ANN401
        """Return an empty context for `count` sequences of `tokens` tokens."""
        context = self._contexts.get((count, tokens))
        if context is None:
            parameters = self._api.llama_context_default_params()
            parameters.n_ctx = count * tokens
            parameters.n_batch = count * tokens
            parameters.n_ubatch = _UBATCH
            parameters.n_seq_max = count
            parameters.n_threads = parameters.n_threads_batch = self._threads
            parameters.kv_unified = False
            parameters.no_perf = True
            context = self._api.llama_init_from_model(self._model, parameters)
            if not context:
                raise LlamaError("there is no context for so many tokens")
            self._contexts[count, tokens] = context
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)
        return context


def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level >= _WARNING:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def main(model: Path, threads: int, gguf: Path) -> None:
    """Answer until standard input ends."""
    to = answers()
    write_gguf(model, gguf)
    size = vocab_size(model)
    serve(Llama(gguf, threads, size), size, to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
