"""`kilburn fetch`: a model is brought to this machine before anything needs it."""

import signal
from types import FrameType

import click

from cli import lifeline
from kilburn.config import DEFAULT_MODEL


@click.command()
@click.argument("model", envvar="KILBURN_MODEL", default=DEFAULT_MODEL)
def fetch(model: str) -> None:
    """Bring a model to this machine.

    The default model is converted, once. Prints the model's folder.
    """
    from executor.fetch import ensure_model

    if lifeline.supervised():
        lifeline.follow_parent()
    signal.signal(signal.SIGTERM, _interrupt)
    click.echo(ensure_model(model))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C: what was begun is removed, and pip ends too."""
    raise KeyboardInterrupt
