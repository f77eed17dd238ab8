"""What `benchmarks.kernels` compares attention with: torch on contiguous memory, torch on gathered pages, and vLLM's operator.

Knows how each of them is at its best; not how it is measured. K and V of a case lie in contiguous copies, and a call takes
the next one. There are several ways to ask torch for the same; each is tried, and the fastest is the peer:

    decode    `folded`: a group's query heads are the rows of one KV head. `products`: softmax between two matrix products.
    prefill   `grouped`: enable_gqa. `viewed`: K and V expanded to the group, without a copy. `folded`: as above, with the mask
              of every head in one. `split`: the context without a mask, then the chunk, causal, joined by their logsumexps.
    gathered  blocks of one head through a table into memory that is there already, then the fastest of the above.

With no context all but `folded` are causal without a mask.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from benchmarks.kernels_cases import PREFILL, Case, Room
from benchmarks.kernels_data import Source, queries

_VLLM: Final = Path(__file__).with_name("kernels_vllm.py")

#: After this the threads of another process's OpenMP have gone to sleep, and do not take our cores.
_HANDOVER_S: Final = 0.02

Attend = Callable[[Tensor, Tensor], Tensor]


class Contiguous:
    """A case's K and V, [copies, 2, sequences, kv_heads, tokens, size], and the ways to attend to them with torch."""

    def __init__(self, case: Case, room: Room, dtype: torch.dtype, device: torch.device) -> None:
        heads = case.heads
        self._case = case
        self._copies = torch.empty(
            room.copies, 2, case.sequences, heads.kv_heads, case.tokens, heads.size, dtype=dtype, device=device
        )
        source = Source(heads.kv_heads, heads.size, case.tokens, dtype)
        for sequence in range(case.sequences):
            for part, rows in enumerate(source.rows(sequence, 0, case.tokens)):
                self._copies[:, part, sequence] = rows.transpose(0, 1)
        self._queries = queries(case.sequences * case.rows, heads.q_heads, heads.size, dtype).to(device)
        self._ways = _prefill_ways(case, self._queries) if case.part == PREFILL else _decode_ways(case, self._queries)

    def ways(self) -> dict[str, Callable[[int], Tensor]]:
        """Return the ways that attend to the next copy, each to [sequences * rows, q_heads, size]."""
        return {name: self._of_copies(attend) for name, attend in self._ways.items()}

    def gathered(self, way: str) -> Callable[[int], Tensor]:
        """Return what gathers blocks first. Tokens must fill their blocks.

        All copies are alike, so a block may come from any: a table takes each from a random copy, and the next call's from the
        copy behind that. A block of one head lies in one piece.
        """
        case, copies = self._case, self._copies
        assert case.tokens % case.block_size == 0
        count, heads = len(copies), case.sequences * case.heads.kv_heads
        pages = copies.view(-1, case.block_size * case.heads.size)
        chance = torch.Generator().manual_seed(1)
        table = torch.randint(count, (case.sequences, 1, case.blocks), generator=chance)
        table = table.expand(-1, case.heads.kv_heads, -1).reshape(heads * case.blocks)
        places = torch.arange(heads * case.blocks)
        first = [((table + number) % count * 2 * len(places) + places).to(pages.device) for number in range(count)]
        second = [index + len(places) for index in first]
        keys, values = (torch.empty_like(pages[: len(places)]) for _ in range(2))
        attend = self._ways[way]

        def call(number: int) -> Tensor:
            torch.index_select(pages, 0, first[number % count], out=keys)
            torch.index_select(pages, 0, second[number % count], out=values)
            return attend(keys.view(copies.shape[2:]), values.view(copies.shape[2:]))

        return call

    def _of_copies(self, attend: Attend) -> Callable[[int], Tensor]:
        copies = self._copies

        def call(number: int) -> Tensor:
            copy = copies[number % len(copies)]
            return attend(copy[0], copy[1])

        return call


def _decode_ways(case: Case, rows: Tensor) -> dict[str, Attend]:
    heads = case.heads
    grouped = rows.view(case.sequences, heads.kv_heads, heads.group, heads.size)

    def folded(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(grouped, keys, values).view(rows.shape)

    def products(keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.matmul(grouped, keys.transpose(-1, -2)).mul_(heads.size**-0.5)
        return torch.matmul(torch.softmax(scores, dim=-1), values).view(rows.shape)

    return {"folded": folded, "products": products}


def _prefill_ways(case: Case, rows: Tensor) -> dict[str, Attend]:
    heads, context = case.heads, case.tokens - case.rows
    own = rows.transpose(0, 1)[None]  # [1, q_heads, rows, size]
    own = own.contiguous()
    by_group = own.view(heads.kv_heads, heads.group, case.rows, heads.size)
    folded_rows = own.view(1, heads.kv_heads, heads.group * case.rows, heads.size)
    seen = torch.ones(case.rows, case.tokens, dtype=torch.bool, device=rows.device).tril(context)
    mask = torch.zeros(seen.shape, dtype=rows.dtype, device=rows.device).masked_fill_(~seen, -torch.inf)
    folded_mask = mask.repeat(heads.group, 1)
    causal: dict[str, Any] = {"attn_mask": mask} if context else {"is_causal": True}

    def ordered(out: Tensor) -> Tensor:
        return out.reshape(heads.q_heads, case.rows, heads.size).transpose(0, 1)

    def expanded(tensor: Tensor) -> Tensor:
        return tensor[0][:, None].expand(-1, heads.group, -1, -1)

    def grouped(keys: Tensor, values: Tensor) -> Tensor:
        return ordered(F.scaled_dot_product_attention(own, keys, values, enable_gqa=True, **causal))

    def viewed(keys: Tensor, values: Tensor) -> Tensor:
        return ordered(F.scaled_dot_product_attention(by_group, expanded(keys), expanded(values), **causal))

    def folded(keys: Tensor, values: Tensor) -> Tensor:
        return ordered(F.scaled_dot_product_attention(folded_rows, keys, values, attn_mask=folded_mask))

    def split(keys: Tensor, values: Tensor) -> Tensor:
        old, old_sum = _flash(folded_rows, keys[:, :, :context], values[:, :, :context], is_causal=False)
        new, new_sum = _flash(by_group, expanded(keys[:, :, context:]), expanded(values[:, :, context:]), is_causal=True)
        share = torch.sigmoid(old_sum.reshape(heads.q_heads, case.rows, 1) - new_sum.reshape(heads.q_heads, case.rows, 1))
        flat = (heads.q_heads, case.rows, heads.size)
        return ordered(torch.lerp(new.reshape(flat), old.reshape(flat), share.to(rows.dtype)))

    ways: dict[str, Attend] = {"grouped": grouped, "viewed": viewed, "folded": folded}
    return ways | {"split": split} if context else ways


def _flash(query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return what SDPA returns, and the logsumexp of each row's scores, which it keeps to itself."""
    if query.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, is_causal)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, is_causal)
    return found[0], found[1]


class VllmError(Exception):
    """The other process does not do it: one line for people; it has written more."""


class Vllm:
    """vLLM's own operator for decodes, in a process of its own under an interpreter that has it; see `kernels_vllm`.

    One of the two processes works at a time: what is between them waits until the other's threads sleep.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version = str(self._read()["version"])

    def load(self, case: Case, dtype: torch.dtype) -> Tensor:
        """Make the tensors of a case; those of the last one go. Returns what it computes, [sequences, q_heads, size]."""
        answer = self._ask({"case": asdict(case), "dtype": str(dtype).removeprefix("torch.")})
        return torch.tensor(answer["output"], dtype=torch.float32).view(case.sequences, case.heads.q_heads, case.heads.size)

    def turn(self, uncounted: int, calls: int) -> list[float]:
        """See Contender."""
        time.sleep(_HANDOVER_S)
        # Awake after a sleep: more than one call before those that count.
        found = self._ask({"uncounted": uncounted + 1, "calls": calls})["seconds"]
        time.sleep(_HANDOVER_S)
        return cast("list[float]", found)

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why, or `_read` does
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError(f"{self._process.args!r} ended with status {self._process.wait()}")
        return cast("dict[str, Any]", json.loads(line))


@contextmanager
def vllm_process(python: Path, threads: int, cache_bytes: int) -> Iterator[Vllm]:
    """Start it, and end it.

    Raises:
        VllmError: it does not start; or later, in one of its calls.
    """
    command = [str(python), str(_VLLM), str(threads), str(cache_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Vllm(process)
    finally:
        process.kill()
        process.communicate()
