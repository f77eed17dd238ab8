"""The flags of the server commands, and the frozen configurations that they become.

All server commands take the same flags, so that one set (or one environment: KILBURN_ and the flag's name) serves all three
processes, and each process checks all of them; it reads those that concern it. Knows no service.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, cast

import click

from kilburn.config import (
    DEFAULT_MODEL,
    Address,
    Dtype,
    ExecutorConfig,
    ForwardPath,
    GatewayConfig,
    LogConfig,
    LogFormat,
    LogLevel,
    MemmgrConfig,
    Preemption,
    check_block_size,
    parse_address,
    parse_bytes,
)
from kilburn.errors import StartError
from kilburn.limits import MAX_BLOCK_SIZE
from kilburn.wire import endpoints

P = ParamSpec("P")

ENVIRONMENT_PREFIX: Final = "KILBURN_"

DEFAULT_SERVER: Final = "127.0.0.1:50051"
DEFAULT_ADMIN: Final = "127.0.0.1:50052"

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)

#: More is no machine's: a limit against slips of the keyboard, and what a protobuf field holds.
_MAX_COUNT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """All flags of a server command, checked one by one and together."""

    model: str
    device: str
    dtype: Dtype
    attention: str
    forward: ForwardPath
    block_size: int
    num_blocks: int | None
    kv_memory_bytes: int | None
    host_blocks: int
    preemption: Preemption
    prefix_cache: bool
    max_model_len: int | None
    max_running: int
    max_waiting: int
    max_step_tokens: int | None
    listen: Address
    admin: Address
    runtime_dir: Path
    pool_dir: Path | None
    gateway_endpoint: str
    executor_endpoint: str
    journal: Path | None
    poison: bool
    log: LogConfig

    def memmgr(self) -> MemmgrConfig:
        """Return the part that the memory manager is told."""
        return MemmgrConfig(
            runtime_dir=self.runtime_dir,
            gateway_endpoint=self.gateway_endpoint,
            executor_endpoint=self.executor_endpoint,
            admin=self.admin,
            prefix_cache=self.prefix_cache,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_step_tokens=self.max_step_tokens,
            journal=self.journal,
            preemption=self.preemption,
            log=self.log,
        )

    def executor(self) -> ExecutorConfig:
        """Return the part that the executor is told."""
        return ExecutorConfig(
            runtime_dir=self.runtime_dir,
            executor_endpoint=self.executor_endpoint,
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            attention=self.attention,
            forward=self.forward,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_memory_bytes=self.kv_memory_bytes,
            max_model_len=self.max_model_len,
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            host_blocks=self.host_blocks,
            pool_dir=self.pool_dir,
            poison=self.poison,
            log=self.log,
        )

    def gateway(self) -> GatewayConfig:
        """Return the part that the gateway is told."""
        return GatewayConfig(
            runtime_dir=self.runtime_dir,
            gateway_endpoint=self.gateway_endpoint,
            listen=self.listen,
            model=self.model,
            log=self.log,
        )


# ------------------------------------------------------------------------------------------------ reading one value


class Parsed(click.ParamType[object]):
    """A flag's value read by a function that raises StartError."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        """Return the value that the text means."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except StartError as error:
            self.fail(str(error), param, ctx)


class WholeRange(click.IntRange):
    """Whole numbers in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401 - click's
        """Return the number that the text means."""
        return super().convert(whole_number(value) if isinstance(value, str) else value, param, ctx)


class NumberRange(click.FloatRange):
    """Numbers in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's
        """Return the number that the text means."""
        return super().convert(number(value) if isinstance(value, str) else value, param, ctx)


def whole_number(text: str) -> int:
    """Read a whole number.

    Raises:
        click.BadParameter: it is none.
    """
    try:
        return int(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no whole number") from error


def number(text: str) -> float:
    """Read a number.

    Raises:
        click.BadParameter: it is none.
    """
    try:
        return float(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no number") from error


def _device(text: str) -> str:
    if not _DEVICE.fullmatch(text):
        raise StartError(f"{text!r} is no device; write auto, cpu, cuda or cuda:N")
    return text


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise StartError("the path is empty")
    return Path(text).expanduser().absolute()


def _block_size(text: str) -> int:
    return check_block_size(whole_number(text))


def target(text: str) -> str:
    """Read where a server is: HOST:PORT, or another of gRPC's forms, which have a slash.

    Raises:
        StartError: it is neither.
    """
    return text if "/" in text else str(parse_address(text))


def _endpoint(text: str) -> str:
    return endpoints.check_endpoint(text)


_COUNT: Final = WholeRange(1, _MAX_COUNT)

# ---------------------------------------------------------------------------------------------------- the flags

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def flag(name: str, **rest: Any) -> Decorator:  # noqa: ANN401 - click's
    """Return a click option that is also read from the environment as KILBURN_ and its name."""
    first = name.split("/")[0].removeprefix("--")
    variable = ENVIRONMENT_PREFIX + first.replace("-", "_").upper()
    return click.option(name, envvar=variable, **{"show_default": "default" in rest, **rest})


def together(*decorators: Decorator) -> Decorator:
    """Return one decorator that does what these do, the first one's option shown first."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for one in reversed(decorators):
            command = one(command)
        return command

    return decorate


_LISTEN: Final = flag(
    "--listen", type=Parsed("address", parse_address), default=DEFAULT_SERVER, help="The gateway's gRPC; port 0: a free one."
)
_ADMIN: Final = flag(
    "--admin", type=Parsed("address", parse_address), default=DEFAULT_ADMIN, help="memmgr's gRPC; port 0: a free one."
)
_RUNTIME_DIR: Final = flag(
    "--runtime-dir",
    type=Parsed("folder", _path),
    default=lambda: str(endpoints.default_runtime_dir()),
    show_default="in XDG_RUNTIME_DIR, else in the temporary folder",
    help="Sockets and locks; one for each instance on a machine.",
)

_server_flags: Final = together(
    flag("--model", default=DEFAULT_MODEL, help="A directory, or a hub name."),
    flag("--device", type=Parsed("device", _device), default="auto", help="auto, cpu, cuda or cuda:N."),
    flag(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Of weights and pool; auto: the model's. Only in float32 is an answer the same in every batch.",
    ),
    flag(
        "--attention",
        type=click.Choice(["auto", "triton", "cpu", "reference"]),
        default="auto",
        help="The backend; auto: triton on a GPU, cpu on a CPU.",
    ),
    flag(
        "--forward",
        type=click.Choice(["auto", "fast", "general"]),
        default="auto",
        help="How the model is run: fast is fused native kernels, for the common families on a CPU; general is transformers' "
        "modules; auto: fast where it can be.",
    ),
    flag("--block-size", type=Parsed("tokens", _block_size), default="16", help=f"Tokens a block, 1 to {MAX_BLOCK_SIZE}."),
    flag("--num-blocks", type=_COUNT, help="Physical blocks; else as many as fit into --kv-memory."),
    flag("--kv-memory", type=Parsed("size", parse_bytes), help="Such as 2GiB; else a share of what is free."),
    flag("--host-blocks", type=WholeRange(0, _MAX_COUNT), default=0, help="Blocks on the host, for --preemption swap."),
    flag(
        "--preemption",
        type=click.Choice(["recompute", "swap"]),
        default="recompute",
        help="Compute what was preempted again, or let it wait on the host.",
    ),
    flag("--prefix-cache/--no-prefix-cache", default=True, help="Keep and share the blocks of equal prefixes."),
    flag("--max-model-len", type=WholeRange(2, _MAX_COUNT), help="Tokens, prompt and output; else the model's."),
    flag("--max-running", type=_COUNT, default=256, help="Sequences in a step."),
    flag("--max-waiting", type=_COUNT, default=1024, help="Requests in the queue."),
    flag("--max-step-tokens", type=_COUNT, help="The budget of a step; else 2048 on a GPU, 256 on a CPU."),
    _LISTEN,
    _ADMIN,
    _RUNTIME_DIR,
    flag("--pool-dir", type=Parsed("folder", _path), help="Where the CPU pool's file lies; else the system's shared memory."),
    flag("--gateway-endpoint", type=Parsed("endpoint", _endpoint), help="Where memmgr hears gateways: ipc://PATH."),
    flag("--executor-endpoint", type=Parsed("endpoint", _endpoint), help="Where memmgr hears executors: ipc://PATH."),
    flag(
        "--journal",
        type=Parsed("file", _path),
        help="Record what the memory does, prompts included, for `kilburn replay`. The file grows without limit: by 5 to 8 bytes "
        "for each token computed, 28 to 34 where one request runs alone.",
    ),
    flag("--poison", is_flag=True, help="Debug: fill the pool, and every freed block, with NaN."),
    flag("--log-format", type=click.Choice(["console", "json"]), default="console", help="Of the log on standard error."),
    flag("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="What is logged."),
)


#: The flags that say where an instance is: `listen`, `admin`, `runtime_dir`.
network_options: Final = together(_LISTEN, _ADMIN, _RUNTIME_DIR)


def server_options(command: Callable[Concatenate[ServerOptions, P], None]) -> Callable[..., None]:
    """Give a command all server flags, and call it with the checked ServerOptions."""

    @wraps(command)
    def read(*args: P.args, **kwargs: P.kwargs) -> None:
        values = {key: kwargs.pop(key) for key in _NAMES}
        command(_check(values), *args, **kwargs)

    return _server_flags(read)


_NAMES: Final = (
    *(
        "model",
        "device",
        "dtype",
        "attention",
        "forward",
        "block_size",
        "num_blocks",
        "kv_memory",
        "host_blocks",
        "preemption",
        "prefix_cache",
    ),
    *("max_model_len", "max_running", "max_waiting", "max_step_tokens", "listen", "admin", "runtime_dir", "pool_dir"),
    *("gateway_endpoint", "executor_endpoint", "journal", "poison", "log_format", "log_level"),
)


def _check(values: dict[str, Any]) -> ServerOptions:
    """Make ServerOptions of single values.

    Raises:
        StartError: they do not go together.
    """
    runtime_dir = values.pop("runtime_dir")
    gateway_endpoint = values.pop("gateway_endpoint") or endpoints.check_endpoint(endpoints.gateway_endpoint(runtime_dir))
    executor_endpoint = values.pop("executor_endpoint") or endpoints.check_endpoint(endpoints.executor_endpoint(runtime_dir))
    log = LogConfig(cast(LogFormat, values.pop("log_format")), cast(LogLevel, values.pop("log_level")))
    options = ServerOptions(
        runtime_dir=runtime_dir,
        gateway_endpoint=gateway_endpoint,
        executor_endpoint=executor_endpoint,
        log=log,
        kv_memory_bytes=values.pop("kv_memory"),
        **values,
    )
    _check_together(options)
    return options


def _check_together(options: ServerOptions) -> None:
    if options.num_blocks is not None and options.kv_memory_bytes is not None:
        raise StartError("--num-blocks and --kv-memory both set the size of the pool; give one of them")
    if options.preemption == "swap" and not options.host_blocks:
        raise StartError("--preemption swap needs room on the host; give --host-blocks as well")
    if options.host_blocks and options.preemption != "swap":
        raise StartError(f"--host-blocks {options.host_blocks} are of no use without --preemption swap")
    if options.gateway_endpoint == options.executor_endpoint:
        raise StartError("--gateway-endpoint and --executor-endpoint are the same")
    if options.listen == options.admin and options.listen.port != 0:
        raise StartError(f"--listen and --admin are both {options.listen}")
    if options.attention == "triton" and options.device == "cpu":
        raise StartError("--attention triton needs a GPU, and --device is cpu")
    if options.attention == "cpu" and options.device.startswith("cuda"):
        raise StartError(f"--attention cpu can't run on --device {options.device}")
