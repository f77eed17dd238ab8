"""vLLM's side of `benchmarks.allocator`: its KVCacheManager, as its scheduler calls it. See `allocator_rounds`.

Runs under an interpreter that has vLLM, which needs nothing of Kilburn but this folder. Written for and measured with 0.32.
The hash is vLLM's default (SHA-256 over pickled tokens); no events, no statistics, no speculation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before it is imported: answers alone go to standard output
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.allocator_rounds import BLOCK_SIZE, MAX_TOKENS, NUM_BLOCKS, serve


class Vllm:
    """An Allocator."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config, max_model_len=MAX_TOKENS, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        self._sampling = SamplingParams(max_tokens=MAX_TOKENS)

    def sequence(self, key: str, tokens: list[int], *, named: bool) -> Any:  # noqa: ANN401 - vLLM's Request
        """See Allocator. A request computes its hashes when it is made; here, where not `named`, when it is admitted."""
        request = Request(key, tokens, self._sampling, None, block_hasher=self._hasher if named else None)
        request._block_hasher = self._hasher
        return request

    def admit(self, sequence: Any) -> int:  # noqa: ANN401
        """See Allocator."""
        if not sequence.block_hashes:
            sequence.update_block_hashes()
        blocks, found, _ = self._manager.get_computed_blocks(sequence)
        added = self._manager.allocate_slots(sequence, sequence.num_tokens - found, found, blocks)
        assert added is not None
        sequence.num_computed_tokens = sequence.num_tokens
        return int(found)

    def decode(self, sequences: list[Any], token: int) -> None:
        """See Allocator. A token's block enters the cache when its slot is allocated, so the token comes first."""
        manager = self._manager
        for sequence in sequences:
            sequence.append_output_token_ids(token)
            assert manager.allocate_slots(sequence, 1) is not None
            sequence.num_computed_tokens += 1

    def free(self, sequence: Any) -> None:  # noqa: ANN401
        """See Allocator."""
        self._manager.free(sequence)

    def flush(self) -> None:
        """See Allocator."""
        assert self._manager.reset_prefix_cache()


if __name__ == "__main__":
    serve(Vllm())
