"""What the command line's tests share: a tiny model, and `kilburn` run as a process of its own."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from cli import lifeline

ROOT: Final = Path(__file__).parents[2]

#: On a busy machine the executor and the gateway take this long to import what they need.
START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 75.0

_READY: Final = re.compile(r"ready: gateway (\S+), admin (\S+), model (.+)\n")


def save_tiny_model(folder: Path) -> Path:
    """Save a random model that reads and writes bytes, with its tokenizer, and return its folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["<end>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(letters) + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def environment(**variables: str) -> dict[str, str]:
    """Return an environment without the caller's settings but for the cache; what runs in it ends with the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KILBURN_") or name == "KILBURN_CACHE"}
    return kept | {lifeline.SUPERVISED: str(os.getpid())} | variables


def kilburn(*words: str, timeout: float = 60.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *words],
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Wait for a condition."""
    give_up = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_seconds} s: {what}"
        time.sleep(0.05)


@dataclass
class Up:
    """A running `kilburn up`."""

    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)
    gateway: str = ""
    admin: str = ""
    model: str = ""

    def role(self, role: str) -> psutil.Process:
        """Return the process of one role, or supervisord's for `daemon`."""
        word = "cli.daemon" if role == "daemon" else role
        return next(process for process in self.tree() if word in process.cmdline())

    def tree(self) -> list[psutil.Process]:
        """Return all processes below `up`."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """End it as Ctrl-C does and return its exit status."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


@contextmanager
def up(runtime_dir: Path, *words: str, **variables: str) -> Iterator[Up]:
    """Run `kilburn up` on free ports until it is ready; end it after the block, if the block has not."""
    flags = ("--runtime-dir", str(runtime_dir), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--device", "cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "up", *flags, *words],
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    running = Up(process)
    reader = threading.Thread(target=running.log.extend, args=(process.stderr,))
    reader.start()
    timer = threading.Timer(START_SECONDS, process.terminate)
    timer.start()
    try:
        ready = _READY.fullmatch(process.stdout.readline())
        timer.cancel()
        assert ready, f"not ready: {running.log}"
        running.gateway, running.admin, running.model = ready.groups()
        yield running
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
        process.wait(STOP_SECONDS)
        reader.join(STOP_SECONDS)
        process.stdout.close()
        process.stderr.close()
