"""What the benchmarks' command lines share: their help, seconds, files that are written at the end.

Knows click and paths; not what is measured.
"""

import math
import re
from pathlib import Path
from typing import Any, Final

import click

#: A line that is indented, numbered, or a word with what it means in a column behind it.
_ARRANGED: Final = re.compile(r"\s+\S|\d+\. |\S+ {2,}\S")

#: Before a paragraph it keeps click from filling lines.
_AS_IT_IS: Final = "\b\n"


def help_of(docstring: str | None) -> str:
    """Return a docstring as a command's help: what stands in lines and columns there stays in them."""
    paragraphs = (docstring or "").strip("\n").split("\n\n")
    return "\n\n".join(_AS_IT_IS + text if any(map(_ARRANGED.match, text.split("\n"))) else text for text in paragraphs)


class Seconds(click.FloatRange):
    """Seconds in a range. NaN is in none, whatever click's comparisons say."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's
        """Return the number that the text means."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


def check_writable(path: Path, option: str) -> None:
    """Find out, before the work that it takes, whether a file can be written; leaves what is there as it is.

    Raises:
        click.BadParameter: it can't.
    """
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise click.BadParameter(f"{path} can't be written: {error.strerror}", param_hint=option) from error


def write(path: Path, text: str) -> None:
    """Write a file at the end of the work.

    Raises:
        click.ClickException: it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error
