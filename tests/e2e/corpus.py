"""The exactness prompts and what `transformers` answers to them: two data files, read and written.

`prompts.toml` holds the candidates, `tests/expected/smollm2.json` the kept ones with their answers; `oracle.py` makes the second
from the first. Knows no model, no tokenizer and no server.
"""

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

CANDIDATES: Final = Path(__file__).with_name("prompts.toml")
EXPECTED: Final = Path(__file__).parents[1] / "expected" / "smollm2.json"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Part:
    """Ids first .. first + tokens - 1 of the candidates' text of this name."""

    text: str
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt before it has ids; exactly one of the last three is set."""

    name: str
    text: str | None = None
    chat: tuple[Turn, ...] | None = None
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The log-probabilities of one output position, of the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt and its greedy answer in float32, the end of sequence disabled.

    `text` or `chat` is the form that the prompt had, None for both where it was made of ids. `smallest_gap` is the least
    distance between the best and the second best logit of all positions; `steps` are the first few positions.
    """

    name: str
    text: str | None
    chat: tuple[Turn, ...] | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    smallest_gap: float
    steps: tuple[Step, ...]


def read_candidates(path: Path = CANDIDATES) -> tuple[dict[str, str], list[Candidate]]:
    """Return the named texts and the candidates, in order of preference."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    texts = {name: text.strip() for name, text in data["texts"].items()}
    return texts, [_candidate(entry) for entry in data["prompts"]]


def read_expected(path: Path = EXPECTED) -> list[Expected]:
    """Return the kept prompts with their answers."""
    return [_expected(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["prompts"]]


def write_expected(about: dict[str, str], prompts: list[Expected], path: Path = EXPECTED) -> None:
    """Write the kept prompts, one a line; `about` says what made them."""
    write_rows(about, "prompts", [asdict(prompt) for prompt in prompts], path)


def write_rows(about: dict[str, str], name: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows of that name, one a line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f'{{"about": {json.dumps(about)},\n"{name}": [\n{lines}\n]}}\n', encoding="utf-8")


def _candidate(entry: dict[str, Any]) -> Candidate:
    chat = _turns(entry.get("chat"))
    part = Part(**entry["part"]) if "part" in entry else None
    text = entry.get("text")
    assert sum(form is not None for form in (text, chat, part)) == 1, entry["name"]
    return Candidate(entry["name"], text, chat, part)


def _expected(entry: dict[str, Any]) -> Expected:
    return Expected(
        name=entry["name"],
        text=entry["text"],
        chat=_turns(entry["chat"]),
        prompt_ids=tuple(entry["prompt_ids"]),
        output_ids=tuple(entry["output_ids"]),
        smallest_gap=entry["smallest_gap"],
        steps=tuple(
            Step(step["token_id"], step["logprob"], tuple((token, logprob) for token, logprob in step["top"]))
            for step in entry["steps"]
        ),
    )


def _turns(chat: list[dict[str, str]] | None) -> tuple[Turn, ...] | None:
    return None if chat is None else tuple(Turn(**turn) for turn in chat)
