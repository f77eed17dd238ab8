"""vLLM's side of `benchmarks.kernels`: the attention operator of its CPU backend, as its backend calls it, on decodes.

Runs under an interpreter that has vLLM, which needs nothing of Kilburn but this folder. Written for and measured with vllm-
cpu 0.32. Everything is as its CPUAttentionBackend has it: blocks of 128 tokens, the instructions that it chooses for them,
one tensor of a cache for each layer, the long contexts split over threads, torch's OpenMP loaded before all else, threads not
bound.

It reads one JSON object a line and answers with one: a case to make tensors for, or a number of calls to time. Calls go round
over as many layers as the rule of memory asks for (kernels_cases).
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TextIO

#: Only in place of this folder, whose modules have names that vLLM's packages may look for.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

_BLOCK_SIZE: Final = 128


def _start_as_vllm_does(threads: str) -> None:
    """Begin anew with the environment that vLLM gives its workers; a runtime reads it once, when it is loaded."""
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        return
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None, "this interpreter has no torch"  # noqa: PT018
    runtimes = sorted(Path(torch.origin).parent.glob("lib/libgomp*.so*"))
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",  # answers alone go to standard output
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": threads,
    }
    if runtimes:
        environment["LD_PRELOAD"] = str(runtimes[0])
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606 - ourselves


class Decodes:
    """A case's cache, one tensor for each layer, in blocks at random places."""

    def __init__(self, case: dict[str, Any], dtype: Any, distance: int) -> None:  # noqa: ANN401 - a torch.dtype
        import torch
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        from benchmarks.kernels_data import Source, queries

        sequences, tokens = case["sequences"], case["tokens"]
        q_heads, kv_heads, size = (case["heads"][name] for name in ("q_heads", "kv_heads", "size"))
        blocks = -(-tokens // _BLOCK_SIZE)
        count = sequences * blocks
        isa = _get_attn_isa(dtype, _BLOCK_SIZE, size, "auto")
        layer_bytes = count * kv_heads * _BLOCK_SIZE * 2 * size * dtype.itemsize
        self._caches = []
        table = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(sequences, blocks)
        source = Source(kv_heads, size, tokens, dtype)
        positions = torch.arange(tokens)
        for _ in range(-(-distance // layer_bytes)):
            cache = torch.zeros(count, kv_heads, 2 * _BLOCK_SIZE, size, dtype=dtype)
            halves = cache.chunk(2, dim=2)
            for sequence in range(sequences):
                slots = table[sequence, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
                ops.cpu_attn_reshape_and_cache(*source.rows(sequence, 0, tokens), *halves, slots, isa)
            self._caches.append(halves)
        lengths = torch.full((sequences,), tokens, dtype=torch.int32)
        starts = torch.arange(sequences + 1, dtype=torch.int32)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=sequences,
            num_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        rows = queries(sequences, q_heads, size, dtype)
        self.output = torch.empty_like(rows)
        self._arguments = {
            "query": rows,
            "output": self.output,
            "query_start_loc": starts,
            "seq_lens": lengths,
            "scale": size**-0.5,
            "causal": True,
            "alibi_slopes": None,
            "sliding_window": -1,
            "block_table": table,
            "softcap": 0,
            "scheduler_metadata": metadata,
            "s_aux": None,
        }
        self._attend = ops.cpu_attention_with_kv_cache
        self._next = 0

    def call(self) -> float:
        """Attend to the next layer. Returns its seconds."""
        keys, values = self._caches[self._next % len(self._caches)]
        self._next += 1
        began = time.perf_counter()
        self._attend(key_cache=keys, value_cache=values, **self._arguments)
        return time.perf_counter() - began


def main(threads: int, cache_bytes: int) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    import torch
    import vllm
    from vllm.platforms import current_platform

    from benchmarks.kernels_cases import rotation_bytes

    torch.set_num_threads(threads)
    current_platform.import_kernels()
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    with torch.inference_mode():  # as its workers
        _answer(answers, rotation_bytes(cache_bytes))


def _answer(answers: TextIO, distance: int) -> None:
    import torch

    decodes = None
    for line in sys.stdin:
        question = json.loads(line)
        if "case" in question:
            decodes = None  # first, so that two cases are never there at once
            decodes = Decodes(question["case"], getattr(torch, question["dtype"]), distance)
            decodes.call()
            answer: dict[str, object] = {"output": decodes.output.float().flatten().tolist()}
        else:
            assert decodes is not None
            for _ in range(question["uncounted"]):
                decodes.call()
            answer = {"seconds": [decodes.call() for _ in range(question["calls"])]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _start_as_vllm_does(sys.argv[1])
    main(*map(int, sys.argv[1:]))
