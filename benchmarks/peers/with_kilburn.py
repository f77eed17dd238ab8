"""Our side of `benchmarks.peers`: `kilburn up` with its three processes, asked through the gateway over gRPC.

Runs under our own interpreter. The client is a part of what is measured: its threads, one for each request, share the processors
with the three services.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.peers.worker import MAX_REQUESTS, About, Answer, answers, serve, vocab_size
from cli.instance import instance
from kilburn.client import Client
from kilburn.v1 import inference_pb2 as api

#: As much as vLLM has for its cache.
_KV_MEMORY: Final = "2GiB"

_TIMEOUT_SECONDS: Final = 600.0


class Kilburn:
    """An Engine."""

    def __init__(self, client: Client, flags: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self._client = client
        self._flags = flags
        self._pool = pool

    def about(self) -> About:
        """See Engine."""
        model = self._client.model()
        how = f"through the gateway, {model.dtype}, attention {model.attention_backend}, blocks of {model.block_size}"
        return About(metadata.version("kilburn"), " ".join((f"{how};", *self._flags)).removesuffix(";"))

    def prepare(self, prompts: Sequence[Sequence[int]], outputs: int) -> Callable[[], list[Answer]]:
        """See Engine."""
        requests = [
            api.GenerateRequest(
                token_ids=api.TokenIds(ids=prompt),
                sampling=api.Sampling(temperature=0),
                stopping=api.Stopping(max_tokens=outputs, ignore_eos=True),
            )
            for prompt in prompts
        ]

        def run() -> list[Answer]:
            return list(self._pool.map(self._stream, requests))

        return run

    def _stream(self, request: api.GenerateRequest) -> Answer:
        ids: list[int] = []
        first: float | None = None
        cached = 0
        began = time.perf_counter()
        for response in self._client.generate(request, _TIMEOUT_SECONDS):
            if first is None and response.token_ids:
                first = time.perf_counter() - began
            ids.extend(response.token_ids)
            if response.HasField("usage"):
                cached = response.usage.cached_tokens
        return Answer(ids, first, cached)


def main(model: Path, threads: int, flags: Sequence[str]) -> None:
    """Answer until standard input ends."""
    to = answers()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the executor
    own = ("--model", str(model), "--device", "cpu", "--dtype", "bfloat16", "--kv-memory", _KV_MEMORY)
    with (
        tempfile.TemporaryDirectory(prefix="kilburn-bench-") as folder,
        instance(Path(folder) / "run", *own, *flags) as running,
        Client(running.gateway) as client,
        ThreadPoolExecutor(MAX_REQUESTS) as pool,
    ):
        # All threads are there before anything is timed.
        together = threading.Barrier(MAX_REQUESTS)
        list(pool.map(lambda _: together.wait(), range(MAX_REQUESTS)))
        serve(Kilburn(client, flags, pool), vocab_size(model), to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
