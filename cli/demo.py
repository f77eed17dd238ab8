"""`python -m cli.demo`: the whole system once, as a user would run it.

Starts `kilburn up` on free ports and in a private folder, asks a question through the gateway, looks at the memory while the
answer grows, ends everything, and exits with 0 only if all of that went right.
"""

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import grpc
from rich.console import Console

from cli import lifeline
from cli.tables import show_block_table, show_pool
from kilburn.client import AdminClient, Client
from kilburn.v1 import admin_pb2, inference_pb2

_QUESTION: Final = "What is the capital of France, and what is it known for?"
_EXPECTED: Final = "Paris"

#: The block table is asked for when so many tokens are there: enough for a look that shows something, early enough that
#: the request lives on while the call is on its way.
_LOOK_AFTER_TOKENS: Final = 4

#: The first run fetches and converts the model; `up` shows how far it is.
_START_TIMEOUT_SECONDS: Final = 1200
_ANSWER_TIMEOUT_SECONDS: Final = 600
_STOP_TIMEOUT_SECONDS: Final = 75

_READY: Final = re.compile(r"ready: gateway (\S+), admin (\S+), model (.+)\n")


class DemoError(Exception):
    """What went wrong, in one line."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Where a running instance answers."""

    gateway: str
    admin: str
    model: str


def main() -> int:
    """Run the demonstration and return its exit status."""
    console = Console(highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="kilburn-demo-") as folder:
            runtime_dir = Path(folder) / "run"
            with _instance(runtime_dir) as instance:
                console.print(f"serving {instance.model} at {instance.gateway}\n\n> {_QUESTION}\n", soft_wrap=True)
                _ask(instance, console)
            if runtime_dir.exists():  # it belongs to `up`, which removes it
                raise DemoError(f"something was left in it: {', '.join(path.name for path in runtime_dir.iterdir())}")
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)  # grpc raises one object that is both
        print(f"\ndemo: {call.code().name}: {call.details()}", file=sys.stderr)
        return 1
    console.print("\nall processes have ended, nothing is left behind")
    return 0


@contextmanager
def _instance(runtime_dir: Path) -> Iterator[Instance]:
    """Run `kilburn up` for the block, and end it.

    Raises:
        DemoError: it did not start, or did not end well.
    """
    flags = ["--runtime-dir", str(runtime_dir), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "warning"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "up", *flags],
        env=lifeline.environment_of_child(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    timer = threading.Timer(_START_TIMEOUT_SECONDS, process.terminate)  # then its output ends
    timer.start()
    try:
        line = process.stdout.readline()
        timer.cancel()
        ready = _READY.fullmatch(line)
        if ready is None:
            raise DemoError("kilburn up did not become ready")
        yield Instance(*ready.groups())
    finally:
        timer.cancel()
        process.terminate()
        try:
            status = process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoError("kilburn up did not end") from None
    if status != 0:
        raise DemoError(f"kilburn up ended with status {status}")


def _ask(instance: Instance, console: Console) -> None:
    request = inference_pb2.GenerateRequest(
        request_id="demo",
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=_QUESTION)]),
        sampling=inference_pb2.Sampling(temperature=0),
        stopping=inference_pb2.Stopping(max_tokens=128),
    )
    answer: list[str] = []
    tokens = 0
    sequence: admin_pb2.Sequence | None = None
    pool: admin_pb2.Pool | None = None
    with Client(instance.gateway) as client, AdminClient(instance.admin) as admin:
        for response in client.generate(request, timeout=_ANSWER_TIMEOUT_SECONDS):
            print(response.text, end="", flush=True)
            answer.append(response.text)
            tokens += len(response.token_ids)
            if sequence is None and tokens >= _LOOK_AFTER_TOKENS:
                sequence, pool = admin.sequence(request.request_id), admin.pool()
        print()
        after = admin.pool()
    if _EXPECTED not in "".join(answer):
        raise DemoError(f"the answer does not name {_EXPECTED}")
    if sequence is None or pool is None:
        raise DemoError("the answer was too short to look at its blocks")
    console.print(f"\n{sequence.output_tokens} tokens into the answer:")
    show_block_table(sequence, console)
    console.print()
    show_pool(pool, console)
    if after.live_blocks:
        raise DemoError(f"{after.live_blocks} blocks are still live after the answer")


if __name__ == "__main__":
    sys.exit(main())
