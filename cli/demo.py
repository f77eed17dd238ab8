"""`python -m cli.demo`: the whole system once, as a user would run it.

Starts `kilburn up` on free ports and in a private folder, asks a question through the gateway, looks at the memory while the
answer grows, ends everything, and exits with 0 only if all of that went right.
"""

import sys
import tempfile
from pathlib import Path
from typing import Final, cast

import grpc
from rich.console import Console

from cli.instance import Instance, instance
from cli.tables import show_block_table, show_pool
from kilburn.client import AdminClient, Client
from kilburn.errors import KilburnError
from kilburn.v1 import admin_pb2, inference_pb2

#: Said before anything is there to be shown; a fetch shows by itself how far it is.
_STARTING: Final = (
    "starting kilburn up: memory manager, executor and gateway. That takes some seconds; the first time, a model is fetched and "
    "converted before, which takes a minute or more"
)

_QUESTION: Final = "What is the capital of France, and what is it known for?"
_EXPECTED: Final = "Paris"

#: The block table is asked for when so many tokens are there: enough for a look that shows something, early enough that
#: the request lives on while the call is on its way.
_LOOK_AFTER_TOKENS: Final = 4

_ANSWER_TIMEOUT_SECONDS: Final = 600


class DemoError(KilburnError):
    """What went wrong, in one line."""


def main() -> int:
    """Run the demonstration and return its exit status."""
    console = Console(highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="kilburn-demo-") as folder:
            runtime_dir = Path(folder) / "run"
            console.print(_STARTING, soft_wrap=True)
            with instance(runtime_dir) as running:
                console.print(f"serving {running.model} at {running.gateway}\n\n> {_QUESTION}\n", soft_wrap=True)
                _ask(running, console)
            if runtime_dir.exists():  # it belongs to `up`, which removes it
                raise DemoError(f"something was left in it: {', '.join(path.name for path in runtime_dir.iterdir())}")
    except KilburnError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)  # grpc raises one object that is both
        print(f"\ndemo: {call.code().name}: {call.details()}", file=sys.stderr)
        return 1
    console.print("\nall processes have ended, nothing is left behind")
    return 0


def _ask(running: Instance, console: Console) -> None:
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
    with Client(running.gateway) as client, AdminClient(running.admin) as admin:
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
    console.print(f"\n{sequence.output_tokens} tokens into the answer (filled: as planned, steps under way included):")
    show_block_table(sequence, console)
    console.print()
    show_pool(pool, console)
    if after.live_blocks:
        raise DemoError(f"{after.live_blocks} blocks are still live after the answer")
    # It was 0 in the table: what is kept of an answer is known at its end.
    console.print(
        f"\nafter the answer: no block live, {after.cached_blocks} cached; {after.counters.decode_tokens} decode tokens, "
        "which are counted as a sequence ends",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
