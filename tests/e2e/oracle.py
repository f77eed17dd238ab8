"""Makes `tests/expected/smollm2.json` anew: what `transformers` answers to the exactness prompts.

    python -m tests.e2e.oracle [--model FOLDER]

float32 on the CPU, greedy, one prompt at a time, 64 new tokens. The end of sequence is disabled (not suppressed: the model may
choose it and goes on after it), so that all 64 are compared. A candidate is kept if the two best logits are more than MIN_GAP
apart at every position: then rounding can't change a token, and a difference is a fault.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import torch
import transformers
from rich.progress import track

from kilburn.config import DEFAULT_MODEL
from tests.e2e.corpus import EXPECTED, Candidate, Expected, Step, read_candidates, write_expected

KEPT: Final = 24
NEW_TOKENS: Final = 64

#: The noise between decoding a token and prefilling it is under 1e-4 in float32.
MIN_GAP: Final = 1e-3

#: Positions whose log-probabilities are kept, and how many alternatives of each.
LOGPROB_STEPS: Final = 4
TOP: Final = 5


class Oracle:
    """The model and the tokenizer as `transformers` has them."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True
        )

    def ids_of(self, candidate: Candidate, texts: dict[str, str]) -> list[int]:
        """Return a candidate's token ids."""
        if candidate.text is not None:
            return self._tokenize(candidate.text)
        if candidate.chat is not None:
            messages = [{"role": turn.role, "content": turn.content} for turn in candidate.chat]
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])
        part = candidate.part
        assert part is not None
        ids = self._tokenize(texts[part.text])[part.first : part.first + part.tokens]
        if len(ids) != part.tokens:
            raise click.ClickException(f"{candidate.name}: the text {part.text!r} has too few tokens")
        return ids

    def answer(self, candidate: Candidate, ids: list[int]) -> Expected:
        """Return the greedy answer to a prompt."""
        prompt = torch.tensor([ids])
        generated = self._model.generate(prompt, attention_mask=torch.ones_like(prompt))
        output = [int(token) for token in generated.sequences[0, len(ids) :]]
        assert len(output) == NEW_TOKENS
        logits = torch.cat(generated.logits)  # [NEW_TOKENS, vocabulary], float32
        best = logits.topk(2).values
        return Expected(
            name=candidate.name,
            text=candidate.text,
            chat=candidate.chat,
            prompt_ids=tuple(ids),
            output_ids=tuple(output),
            smallest_gap=round(float((best[:, 0] - best[:, 1]).min()), 6),
            steps=tuple(_steps(logits[:LOGPROB_STEPS].double(), output)),
        )

    def _tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])


def _steps(logits: torch.Tensor, output: list[int]) -> Iterator[Step]:
    for row, token in zip(logits.log_softmax(dim=-1), output, strict=False):
        values, tokens = row.topk(TOP)
        top = tuple((int(other), round(float(value), 6)) for other, value in zip(tokens, values, strict=True))
        yield Step(token, round(float(row[token]), 6), top)


@click.command(help=__doc__)
@click.option(
    "--model", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Default: the default model."
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=EXPECTED, show_default=True)
def main(folder: Path | None, output: Path) -> None:
    """Answer candidates until enough are kept, then write the file."""
    if folder is None:
        from executor.fetch import ensure_model

        folder = ensure_model(DEFAULT_MODEL)
    oracle = Oracle(folder)
    texts, candidates = read_candidates()
    kept: list[Expected] = []
    with torch.inference_mode():
        for candidate in track(candidates, description="asking transformers"):
            answer = oracle.answer(candidate, oracle.ids_of(candidate, texts))
            if answer.smallest_gap > MIN_GAP:
                kept.append(answer)
            else:
                click.echo(f"{answer.name} is left out: a gap of {answer.smallest_gap}", err=True)
            if len(kept) == KEPT:
                break
    if len(kept) < KEPT:
        raise click.ClickException(f"only {len(kept)} of {KEPT} prompts hold; add candidates to prompts.toml")
    about = {
        "model": DEFAULT_MODEL,
        "made_by": "python -m tests.e2e.oracle",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    write_expected(about, kept, output)


if __name__ == "__main__":
    main()
