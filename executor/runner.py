"""One step: joins pool, model, slots and sampler, in the order that StepPlan states.

Knows plans and results; not sockets. Steps are numbered without gaps; a plan out of its turn raises PlanError, as does one that
breaks a rule of executor/batch.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.batch import MAX_INSPECTED_ENTRIES, Batch, Slots
from executor.errors import PlanError
from executor.loader import LoadedModel
from executor.logprobs import LogProb
from executor.pool import Pool
from executor.progress import Progress
from executor.sampler import Samples, sample, torch_peaks
from kernels.cpu.backend import CpuBackend
from kernels.cpu.operations import Operations
from kernels.interface import AttentionBackend, KvCache, StepRows
from kilburn.v1.engine_pb2 import BlockCopy, Inspection, SampleChoices, SampleLogprob, StepPlan, StepResult, StepTimes
from kilburn.v1.inference_pb2 import Alternative, TokenLogprob


class Runner:
    """See the module. Used by one thread, the only one that calls torch.

    Args:
        clock_ns: a monotonic clock, for StepTimes.
        poison: fill the blocks that a plan frees with NaN.
        max_step_tokens: rows of a step at most.
    """

    def __init__(
        self,
        *,
        model: LoadedModel,
        backend: AttentionBackend[Any],
        pool: Pool,
        slots: Slots,
        progress: Progress,
        clock_ns: Callable[[], int],
        poison: bool,
        max_step_tokens: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._pool = pool
        self._cache = KvCache(model.shape, pool.frames)
        self._forward = model.forward(backend, self._cache, max_step_tokens, progress)
        self._find_peaks = Operations(backend.instructions).peaks if isinstance(backend, CpuBackend) else torch_peaks
        self._slots = slots
        self._progress = progress
        self._clock_ns = clock_ns
        self._poison = poison
        self._step = 0

    def reset(self) -> None:
        """Close all slots and await step 1: a new memmgr knows nothing of the old one's."""
        self._slots.clear()
        self._step = 0
        self._progress.begin(0)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Do one step. The times `wait` and `receive` are left to the caller.

        Raises:
            PlanError: the plan breaks a rule; what the slots and blocks hold after that is of no meaning.
        """
        if plan.step != self._step + 1:
            raise PlanError(f"step {plan.step} comes after step {self._step}")
        self._step = plan.step
        self._progress.begin(plan.step)
        began = self._clock_ns()
        self._slots.check_blocks(plan)
        if plan.swap_outs:
            self._backend.swap_blocks(self._pool.frames, self._pool.host_frames, _pairs(plan.swap_outs))
        if self._poison:
            self._pool.poison(plan.freed_blocks)
        if plan.swap_ins:
            self._backend.swap_blocks(self._pool.host_frames, self._pool.frames, _pairs(plan.swap_ins))
        if plan.copies:
            self._backend.copy_blocks(self._cache, _pairs(plan.copies))
        batch = self._slots.apply(plan)
        if batch is None:
            return StepResult(step=plan.step, times=StepTimes(prepare=self._clock_ns() - began))
        rows = self._rows(batch)
        inputs = [self._tensor(part) for part in (batch.token_ids, batch.positions, batch.logit_rows)]
        prepared = self._clock_ns()
        logits = self._forward.logits(rows, *inputs)[:, : self._model.vocab_size]
        forwarded = self._clock_ns()
        samples = self._sample(batch, logits)
        times = StepTimes(prepare=prepared - began, forward=forwarded - prepared, sample=self._clock_ns() - forwarded)
        return _result(plan.step, samples, times)

    def inspect(self, number: int) -> Inspection:
        """Return what the slots hold, and what is wrong with them or the pool."""
        faults, checks = self._slots.faults()
        faults += self._pool.faults()
        entries = self._slots.entries()
        if entries > MAX_INSPECTED_ENTRIES:
            faults.append(f"{entries} table entries are too many to list; at most {MAX_INSPECTED_ENTRIES}")
            return Inspection(id=number, faults=faults, checks=checks + 1)
        return Inspection(id=number, slots=self._slots.state(), faults=faults, checks=checks + 1)

    def _sample(self, batch: Batch, logits: Tensor) -> Samples:
        # Several samples may come out of one row, and they are in the plan's order. Often it is each row, in order: no copy then.
        if not np.array_equal(batch.sample_logits, np.arange(logits.shape[0])):
            logits = logits[self._tensor(batch.sample_logits)]
        samples = sample(logits, batch.draws, self._find_peaks)
        drawn = [-1 if draw.choices else token for draw, token in zip(batch.draws, samples.token_ids, strict=True)]
        self._slots.sampled(batch.sample_slots, drawn)
        return samples

    def _rows(self, batch: Batch) -> StepRows:
        return StepRows(
            decodes=batch.decodes,
            query_lengths=batch.query_lengths,
            context_lengths=batch.context_lengths,
            tables=self._tensor(batch.tables),
            write_slots=self._tensor(batch.write_slots),
        )

    def _tensor(self, array: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)


def _pairs(copies: Iterable[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.destination) for copy in copies]


def _result(step: int, samples: Samples, times: StepTimes) -> StepResult:
    return StepResult(
        step=step,
        token_ids=samples.token_ids,
        failed=samples.failed,
        logprobs=[SampleLogprob(sample=number, logprob=_logprob(found)) for number, found in samples.logprobs.items()],
        choices=[
            SampleChoices(sample=number, token_ids=[one[0] for one in told], logprobs=[one[1] for one in told])
            for number, told in samples.choices.items()
        ],
        times=times,
    )


def _logprob(found: LogProb) -> TokenLogprob:
    return TokenLogprob(
        token_id=found.token_id,
        logprob=found.logprob,
        rank=found.rank,
        top=[Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in found.top],
    )
