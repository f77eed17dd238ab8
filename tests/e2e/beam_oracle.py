"""Makes `tests/expected/smollm2_beams.json` anew: the beam searches of `transformers` on ten of the exactness prompts.

    python -m tests.e2e.beam_oracle

float32 on the CPU, one prompt at a time, early_stopping=False, up to 24 new tokens, ends of sequence as the model has them. For
each width all hypotheses are kept, the best first: their ids, without padding, and their scores.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch
import transformers
from rich.progress import track

from kilburn.config import DEFAULT_MODEL
from tests.e2e.corpus import read_expected, write_rows

EXPECTED_BEAMS: Final = Path(__file__).parents[1] / "expected" / "smollm2_beams.json"

WIDTHS: Final = (2, 4, 6)
PROMPTS: Final = 10
NEW_TOKENS: Final = 24
MAX_PROMPT_TOKENS: Final = 330


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis."""

    ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Search:
    """One search: what was asked, and the hypotheses, the best first."""

    name: str
    prompt_ids: tuple[int, ...]
    width: int
    length_penalty: float
    beams: tuple[Beam, ...]


def search(model: Any, prompt_ids: tuple[int, ...], width: int, new_tokens: int, length_penalty: float = 1.0) -> list[Beam]:
    """Return the hypotheses of `transformers`, the best first."""
    prompt = torch.tensor([prompt_ids])
    with torch.inference_mode():
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            early_stopping=False,
            length_penalty=length_penalty,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            output_scores=True,
        )
    # A position that the hypothesis does not have has no beam.
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    outputs = found.sequences[:, len(prompt_ids) :]
    return [
        Beam(tuple(outputs[row, :length].tolist()), float(score))
        for row, (length, score) in enumerate(zip(lengths, found.sequences_scores, strict=True))
    ]


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=EXPECTED_BEAMS, show_default=True)
def main(output: Path) -> None:
    """Search and write the file."""
    from executor.fetch import ensure_model

    folder = ensure_model(DEFAULT_MODEL)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [prompt for prompt in read_expected() if len(prompt.prompt_ids) <= MAX_PROMPT_TOKENS][:PROMPTS]
    rows = [
        Search(prompt.name, prompt.prompt_ids, width, 1.0, tuple(search(model, prompt.prompt_ids, width, NEW_TOKENS)))
        for prompt in track(prompts, description="asking transformers")
        for width in WIDTHS
    ]
    about = {
        "model": DEFAULT_MODEL,
        "made_by": "python -m tests.e2e.beam_oracle",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    write_rows(about, "searches", [asdict(row) for row in rows], output)


if __name__ == "__main__":
    main()
