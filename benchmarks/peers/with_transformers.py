"""transformers' side of `benchmarks.peers`: `generate`, one batch of all requests, bf16, its own choice of attention (SDPA).

Runs under an interpreter that has torch and transformers, which needs nothing of Kilburn but this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

#: In place of this folder, and gone again before anything else is imported: Kilburn's folder kernels/ has the name of a package
#: that transformers looks for.
_ROOT: Final = str(Path(__file__).resolve().parents[2])
sys.path[0] = _ROOT
from benchmarks.peers.worker import About, Answer, answers, serve, vocab_size  # noqa: E402

sys.path.remove(_ROOT)


class Transformers:
    """An Engine."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        # The model's own may sample, and ends at an end of sequence.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def about(self) -> About:
        """See Engine."""
        import torch
        import transformers

        how = f"generate, {self._model.config._attn_implementation}, torch {torch.__version__}"
        return About(transformers.__version__, how)

    def prepare(self, prompts: Sequence[Sequence[int]], outputs: int) -> Callable[[], list[Answer]]:
        """See Engine. All prompts are equally long."""
        import torch

        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)

        def run() -> list[Answer]:
            with torch.inference_mode():
                found = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=outputs)
            return [Answer(one) for one in found[:, ids.shape[1] :].tolist()]

        return run


def main(model: Path, threads: int) -> None:
    """Answer until standard input ends."""
    to = answers()
    serve(Transformers(model, threads), vocab_size(model), to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
