"""One step: joins pool, model, slots and sampler, in the order that StepPlan states.

Knows plans and results; not sockets. Steps are numbered without gaps; a plan out of its turn raises PlanError, as does one that
breaks a rule of executor/batch.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.batch import MAX_INSPECTED_ENTRIES, Batch, Slots, Told
from executor.errors import ExecutorError, PlanError
from executor.loader import LoadedModel
from executor.logprobs import LogProb, logprobs
from executor.native import native_draw
from executor.pool import Pool
from executor.progress import Progress
from executor.sampler import DrawRows, Peaks, Samples, sample, torch_draw, torch_peaks
from kernels.cpu.backend import CpuBackend
from kernels.cpu.operations import Operations
from kernels.interface import AttentionBackend, KvCache, StepRows
from kilburn.v1.engine_pb2 import (
    BlockCopy,
    Inspection,
    PromptLogprobs,
    SampleChoices,
    SampleLogprob,
    StepPlan,
    StepResult,
    StepTimes,
)
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
        self._find_peaks: Peaks = torch_peaks
        self._draw_rows: DrawRows = torch_draw
        if isinstance(backend, CpuBackend):
            operations = Operations(backend.instructions)
            self._find_peaks, self._draw_rows = operations.peaks, native_draw(operations)
        self._slots = slots
        self._progress = progress
        self._clock_ns = clock_ns
        self._poison = poison
        self._step = 0
        self._drawn: list[int] = []  # of the last step, until `take_drawn`
        self._undrawn: tuple[int, ...] = ()  # slots of the last step, until `draw_as`

    def reset(self) -> None:
        """Close all slots and await step 1: a new memmgr knows nothing of the old one's."""
        self._slots.clear()
        self._step = 0
        self._drawn, self._undrawn = [], ()
        self._progress.begin(0)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Do one step. The times `wait` and `receive` are left to the caller.

        Raises:
            PlanError: the plan breaks a rule; what the slots and blocks hold after that is of no meaning.
        """
        began = self._clock_ns()
        batch = self._begin(plan)
        if batch is None:
            return StepResult(step=plan.step, times=StepTimes(prepare=self._clock_ns() - began))
        rows, inputs = self._inputs(batch)
        prepared = self._clock_ns()
        logits = self._forward.logits(rows, *inputs)[:, : self._model.vocab_size]
        forwarded = self._clock_ns()
        samples = self._sample(batch, logits[: len(batch.logit_rows)])
        prompts = [] if batch.told is None else _tell(batch.told, logits[len(batch.logit_rows) :])
        times = StepTimes(prepare=prepared - began, forward=forwarded - prepared, sample=self._clock_ns() - forwarded)
        return _result(plan.step, samples, prompts, times)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Do one step as another rank than 0: all of it but the sampling. `draw_as` comes before the next one.

        Raises:
            PlanError: as `run`.
        """
        batch = self._begin(plan)
        if batch is not None:
            rows, inputs = self._inputs(batch)
            self._forward.logits(rows, *inputs)
            self._undrawn = batch.sample_slots

    def take_drawn(self) -> Sequence[int]:
        """Return, once, what the last step drew for each of its samples, -1 for nothing: what `draw_as` is told elsewhere."""
        drawn, self._drawn = self._drawn, []
        return drawn

    def draw_as(self, drawn: Sequence[int]) -> None:
        """Take what rank 0 drew in the last step; nothing where that was told, or there was nothing to draw."""
        if len(drawn) != len(self._undrawn):
            raise ExecutorError(f"rank 0 has drawn {len(drawn)} tokens, and here there are {len(self._undrawn)} samples")
        if drawn:
            self._slots.sampled(self._undrawn, drawn)
        self._undrawn = ()

    def idle(self) -> None:
        """Nothing is to be done: of no interest to a runner alone."""

    def end(self) -> None:
        """There will be no more plans: of no interest either."""

    def _begin(self, plan: StepPlan) -> Batch | None:
        """Do what comes before the rows of a step, and return them."""
        if plan.step != self._step + 1:
            raise PlanError(f"step {plan.step} comes after step {self._step}")
        self._step = plan.step
        self._progress.begin(plan.step)
        self._slots.check_blocks(plan)
        if plan.swap_outs:
            self._backend.swap_blocks(self._pool.frames, self._pool.host_frames, _pairs(plan.swap_outs))
        if self._poison:
            self._pool.poison(plan.freed_blocks)
        if plan.swap_ins:
            self._backend.swap_blocks(self._pool.host_frames, self._pool.frames, _pairs(plan.swap_ins))
        if plan.copies:
            self._backend.copy_blocks(self._cache, _pairs(plan.copies))
        return self._slots.apply(plan)

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
        samples = sample(logits, batch.draws, self._find_peaks, self._draw_rows)
        drawn = [-1 if draw.choices else token for draw, token in zip(batch.draws, samples.token_ids, strict=True)]
        self._slots.sampled(batch.sample_slots, drawn)
        self._drawn = drawn
        return samples

    def _inputs(self, batch: Batch) -> tuple[StepRows, list[Tensor]]:
        """Return what the forward pass takes: of the rows' logits those to sample from, and then those to tell of."""
        wanted = batch.logit_rows if batch.told is None else np.concatenate((batch.logit_rows, batch.told.rows))
        inputs = [self._tensor(part) for part in (batch.token_ids, batch.positions, wanted)]
        return self._rows(batch), inputs

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


def _tell(told: Told, logits: Tensor) -> list[PromptLogprobs]:
    """Return what is asked for of prompt tokens; `logits` [n, vocabulary] are their rows'. What is NaN is told as NaN."""
    found = iter(logprobs(logits.float(), told.targets, told.alternatives))
    return [PromptLogprobs(logprobs=[_logprob(next(found)) for _ in range(length)]) for length in told.lengths]


def _result(step: int, samples: Samples, prompts: list[PromptLogprobs], times: StepTimes) -> StepResult:
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
        prompts=prompts,
    )


def _logprob(found: LogProb) -> TokenLogprob:
    return TokenLogprob(
        token_id=found.token_id,
        logprob=found.logprob,
        rank=found.rank,
        top=[Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in found.top],
    )
