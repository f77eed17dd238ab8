"""The group of all commands, and how an error ends one: one line on standard error, and a status that says whose fault it was.

0    done
1    the server said no, or can't be reached
2    the command line, the configuration, the model or the machine does not allow it
130  interrupted
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import click

from kilburn import __version__
from kilburn.errors import KilburnError, StartError

_FAILED: Final = 1
_WRONG: Final = 2
_INTERRUPTED: Final = 130

#: Command -> the module that has it, in the order of the help. Imported when the command is used.
_COMMANDS: Final = {
    "up": "cli.up",
    "memmgr": "cli.services",
    "executor": "cli.services",
    "gateway": "cli.services",
    "fetch": "cli.fetch",
    "generate": "cli.generate",
    "pool": "cli.admin",
    "sequences": "cli.admin",
    "blocks": "cli.admin",
    "prefixes": "cli.prefixes",
    "events": "cli.prefixes",
    "explain": "cli.prefixes",
    "probe": "cli.prefixes",
    "pins": "cli.prefixes",
    "quotas": "cli.quotas",
    "verify": "cli.admin",
    "cancel": "cli.admin",
    "simulate": "cli.simulate",
    "replay": "cli.replay",
    "health": "cli.health",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(_COMMANDS[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kilburn")
def kilburn() -> None:
    """Virtual memory for the KV cache: PagedAttention as three processes."""


def run(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit status."""
    try:
        status = kilburn.main(arguments, prog_name="kilburn", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return _WRONG
    except click.ClickException as error:
        return _fail(error.format_message(), _WRONG)
    except StartError as error:
        return _fail(str(error), _WRONG)
    except KilburnError as error:
        return _fail(str(error), _FAILED)
    except click.Abort:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone, `kilburn blocks | head`: the interpreter must not try to flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as error:
        message = _grpc_message(error)
        if message is None:
            raise
        return _fail(message, _FAILED)
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    print(f"kilburn: {' '.join(message.split())}", file=sys.stderr)
    return status


def _grpc_message(error: Exception) -> str | None:
    """Return the line for a failed call, or None where it is something else. Imports nothing: who raised it has."""
    grpc = sys.modules.get("grpc")
    if grpc is None or not isinstance(error, grpc.RpcError):
        return None
    assert isinstance(error, grpc.Call)
    return f"{error.code().name}: {error.details() or 'no details'}"
