"""What each process is told at its start: frozen values, checked, passed down; nothing is read from anywhere later.

`cli/options.py` makes these from flags and the environment. Knows no defaults of the machine (free memory, devices): `None` means
"the process finds out", and the process says what it found.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kilburn.errors import StartError
from kilburn.limits import GIB, KIB, MAX_BLOCK_SIZE, MIB

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Preemption = Literal["recompute", "swap"]
ForwardPath = Literal["auto", "fast", "general"]

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024 * GIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address to listen on; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How a process logs, to standard error."""

    format: LogFormat = "console"
    level: LogLevel = "info"


@dataclass(frozen=True, slots=True)
class MemmgrConfig:
    """The memory manager."""

    runtime_dir: Path
    gateway_endpoint: str
    executor_endpoint: str
    admin: Address
    prefix_cache: bool = True
    max_running: int = 256
    max_waiting: int = 1024
    max_step_tokens: int | None = None  # None: by the executor's device
    journal: Path | None = None
    preemption: Preemption = "recompute"
    log: LogConfig = LogConfig()


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The executor."""

    runtime_dir: Path
    executor_endpoint: str
    model: str
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: Dtype = "auto"
    attention: str = "auto"  # auto, or a name that kernels/ knows
    forward: ForwardPath = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_running: int = 256
    max_step_tokens: int | None = None
    host_blocks: int = 0
    pool_dir: Path | None = None  # None: the system's shared memory
    poison: bool = False
    log: LogConfig = LogConfig()


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway."""

    runtime_dir: Path
    gateway_endpoint: str
    listen: Address
    model: str
    log: LogConfig = LogConfig()


def parse_address(text: str) -> Address:
    """Read HOST:PORT, with an IPv6 host in brackets.

    Raises:
        StartError: it is neither.
    """
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise StartError(f"{text!r} is no address; write HOST:PORT, for example 127.0.0.1:50051")
    return Address(host, int(port))


def parse_bytes(text: str) -> int:
    """Read a size such as 2GiB, 512MiB or 1000000.

    Raises:
        StartError: it is no size, or no whole byte.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise StartError(f"{text!r} is no size; write for example 2GiB or 512MiB")
    return int(float(match[1]) * unit)


def check_block_size(block_size: int) -> int:
    """Return a block size that can be used.

    Raises:
        StartError: it is out of range.
    """
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise StartError(f"--block-size is 1 to {MAX_BLOCK_SIZE} tokens, not {block_size}")
    return block_size
