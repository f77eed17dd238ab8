"""The draw by the CPU's kernels, in place of that by torch: the same tokens, ten to thirty times faster (docs/decisions.md).

Knows what the sampler draws and what the kernels take; neither of the two knows the other.
"""

from collections.abc import Sequence

from torch import Tensor

from executor.sampler import Draw, DrawRows
from kernels.cpu import operations as cpu


def native_draw(operations: cpu.Operations) -> DrawRows:
    """Return a DrawRows for logits on the CPU."""

    def draw_rows(logits: Tensor, rows: Sequence[int], peaks: Sequence[float], draws: Sequence[Draw]) -> Tensor:
        wanted = [
            cpu.Draw(
                row=row,
                peak=peak,
                temperature=draw.sampling.temperature,
                top_p=draw.sampling.top_p,
                top_k=draw.sampling.top_k,
                min_p=draw.sampling.min_p,
                seed=draw.sampling.seed,
                position=draw.position,
                index=draw.index,
            )
            for row, peak, draw in zip(rows, peaks, draws, strict=True)
        ]
        return operations.draw(logits, wanted)

    return draw_rows
