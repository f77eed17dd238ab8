"""Which beam each beam goes on from, at every step of transformers' beam search on the default model: written to a file.

    python -m benchmarks.beam_parents [--steps 160] [--out FILE] [--model DIRECTORY]

The simulator replays the file at the lengths of a trace (memmgr/simulate/beams.py), so that how much beams share is a real
search's doing. Ends of sequence are suppressed: the trace says how long an output is, as in Kwon et al. (2023). In float32: ties
in bfloat16 choose beams by chance. Ten prompts and widths 2, 4, 6 take six minutes of one core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import memmgr.simulate
from benchmarks.options import help_of
from kilburn.config import DEFAULT_MODEL
from kilburn.models import default_model_dir

_OUT: Final = Path(memmgr.simulate.__file__).with_name("beam_parents.json")

_WIDTHS: Final = (2, 4, 6)

#: Prompts that are searched at once. Rows of one prompt do not see those of another.
_BATCH: Final = 5

PROMPTS: Final = (
    "Explain why the sky is blue to a child.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Translate into French: I would like a cup of tea, please.",
    "Give me a recipe for a simple vegetable soup.",
    "Write a Python function that reverses a linked list.",
    "How does a refrigerator keep food cold?",
    "Compose a polite email that asks for a meeting next week.",
    "Rewrite this sentence in the passive voice: The committee approved the plan.",
    "Plan a weekend in Lisbon for two people who like music.",
    "Write a poem about the first snow of the year.",
)


class RecordingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that notes how a beam search reorders it: for each row the one that it goes on from."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See DynamicCache."""
        self.steps.append(beam_idx.tolist())
        super().reorder_cache(beam_idx)


def parents(model: Any, tokenizer: Any, prompts: list[str], width: int, steps: int) -> list[str]:  # noqa: ANN401
    """Search some prompts at once. Returns for each the steps' parents, one digit a beam, with spaces between the steps."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    cache = RecordingCache()
    model.generate(
        **inputs,
        cache=cache,
        num_beams=width,
        do_sample=False,
        early_stopping=False,
        min_new_tokens=steps + 1,  # at the last step nobody runs on, and what is noted means nothing
        max_new_tokens=steps + 1,
    )
    found = []
    for number in range(len(prompts)):
        own = range(number * width, (number + 1) * width)
        rows = [[step[row] for row in own] for step in cache.steps[:steps]]
        assert all(parent in own for row in rows for parent in row), "a beam of another prompt"
        found.append(" ".join("".join(str(parent - own.start) for parent in row) for row in rows))
    return found


@click.command(help=help_of(__doc__))
@click.option("--steps", type=click.IntRange(2, 4096), default=160, show_default=True, help="Of each search.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Else the default model.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=_OUT, help="Else where it is read from.")
def main(steps: int, model: Path | None, out: Path) -> None:
    """See the module."""
    folder = model or default_model_dir()
    if not folder.is_dir():
        raise click.ClickException(f"{folder} is not there; `kilburn fetch` brings the default model")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked, so any token will do
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    recorded: dict[str, list[str]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prompts", total=len(_WIDTHS) * len(PROMPTS))
        for width in _WIDTHS:
            recorded[str(width)] = []
            for start in range(0, len(PROMPTS), _BATCH):
                prompts = list(PROMPTS[start : start + _BATCH])
                recorded[str(width)] += parents(network, tokenizer, prompts, width, steps)
                progress.advance(task, len(prompts))
    text = json.dumps({"model": DEFAULT_MODEL if model is None else folder.name, "widths": recorded}, indent=1)
    out.write_text(text + "\n", encoding="ascii")
    click.echo(out)


if __name__ == "__main__":
    main()
