"""From flags and the environment to the frozen configurations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cli.options import ServerOptions, server_options
from cli.supervision import environment
from kilburn.config import Address, Dtype, ForwardPath, LogConfig, LogFormat, LogLevel
from kilburn.wire import endpoints


def read(words: Sequence[str], variables: Mapping[str, str | None] | None = None) -> ServerOptions:
    """Return what a server command gets."""
    found: list[ServerOptions] = []

    @click.command()
    @server_options
    def command(options: ServerOptions) -> None:
        found.append(options)

    done = CliRunner(env=variables).invoke(command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found[0]


def test_the_defaults_are_the_documented_ones() -> None:
    options = read([])
    runtime_dir = endpoints.default_runtime_dir()
    assert options == ServerOptions(
        model="smollm2-135m-instruct",
        device="auto",
        dtype="auto",
        attention="auto",
        forward="auto",
        block_size=16,
        num_blocks=None,
        kv_memory_bytes=None,
        host_blocks=0,
        preemption="recompute",
        prefix_cache=True,
        max_model_len=None,
        max_running=256,
        max_waiting=1024,
        max_step_tokens=None,
        listen=Address("127.0.0.1", 50051),
        admin=Address("127.0.0.1", 50052),
        runtime_dir=runtime_dir,
        pool_dir=None,
        gateway_endpoint=endpoints.gateway_endpoint(runtime_dir),
        executor_endpoint=endpoints.executor_endpoint(runtime_dir),
        journal=None,
        poison=False,
        log=LogConfig("console", "info"),
    )


def test_each_flag_reaches_its_configuration(tmp_path: Path) -> None:
    options = read(
        [
            *("--model", "m", "--device", "cuda:2", "--dtype", "float16", "--attention", "triton", "--block-size", "7"),
            *("--kv-memory", "1.5GiB", "--no-prefix-cache", "--max-model-len", "99", "--max-running", "3"),
            *("--max-waiting", "4", "--max-step-tokens", "5", "--listen", "[::1]:1", "--admin", "h:2"),
            *("--runtime-dir", str(tmp_path), "--pool-dir", "/p", "--poison", "--log-format", "json", "--log-level", "debug"),
            *("--journal", "/j", "--forward", "general"),
        ]
    )
    log = LogConfig("json", "debug")
    memmgr, executor, gateway = options.memmgr(), options.executor(), options.gateway()
    assert (memmgr.prefix_cache, memmgr.max_running, memmgr.max_waiting, memmgr.max_step_tokens) == (False, 3, 4, 5)
    assert (memmgr.admin, memmgr.journal) == (Address("h", 2), Path("/j"))
    assert (executor.model, executor.device, executor.dtype, executor.attention) == ("m", "cuda:2", "float16", "triton")
    assert executor.forward == "general"
    assert (executor.block_size, executor.num_blocks, executor.kv_memory_bytes) == (7, None, 3 * 2**29)
    assert (executor.max_model_len, executor.max_running, executor.max_step_tokens) == (99, 3, 5)
    assert (executor.pool_dir, executor.poison) == (Path("/p"), True)
    assert (gateway.model, gateway.listen) == ("m", Address("::1", 1))
    assert memmgr.log == executor.log == gateway.log == log
    assert memmgr.gateway_endpoint == gateway.gateway_endpoint == f"ipc://{tmp_path}/gateway.sock"
    assert memmgr.executor_endpoint == executor.executor_endpoint == f"ipc://{tmp_path}/executor.sock"
    assert memmgr.runtime_dir == executor.runtime_dir == gateway.runtime_dir == tmp_path


def test_swapping_needs_room_on_the_host() -> None:
    options = read(["--preemption", "swap", "--host-blocks", "40"])
    assert options.memmgr().preemption == "swap"
    assert options.executor().host_blocks == 40


def test_a_flag_hides_its_variable() -> None:
    assert read([], {"KILBURN_BLOCK_SIZE": "7"}).block_size == 7
    assert read(["--block-size", "9"], {"KILBURN_BLOCK_SIZE": "7"}).block_size == 9
    assert read([], {"KILBURN_PREFIX_CACHE": "0"}).prefix_cache is False
    assert read([], {"KILBURN_POISON": "1"}).poison is True
    assert read([], {"KILBURN_NUM_BLOCKS": ""}).num_blocks is None


counts = st.integers(1, 2**31 - 1)
options_of_any_kind = st.builds(
    ServerOptions,
    model=st.sampled_from(["smollm2-135m-instruct", "/a folder/with spaces", "owner/name"]),
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    dtype=st.sampled_from(get_args(Dtype)),
    attention=st.sampled_from(["auto", "reference"]),
    forward=st.sampled_from(get_args(ForwardPath)),
    block_size=st.integers(1, 1024),
    num_blocks=st.none() | counts,
    kv_memory_bytes=st.none() | counts,
    host_blocks=st.just(0),
    preemption=st.just("recompute"),
    prefix_cache=st.booleans(),
    max_model_len=st.none() | st.integers(2, 2**31 - 1),
    max_running=counts,
    max_waiting=counts,
    max_step_tokens=st.none() | counts,
    listen=st.builds(Address, st.sampled_from(["127.0.0.1", "::1", "localhost"]), st.integers(0, 32767)),
    admin=st.builds(Address, st.sampled_from(["127.0.0.1", "::1", "localhost"]), st.integers(32768, 65535)),
    runtime_dir=st.sampled_from([Path("/r"), Path("/a folder/ü")]),
    pool_dir=st.none() | st.just(Path("/p")),
    gateway_endpoint=st.just("ipc:///g"),
    executor_endpoint=st.just("ipc:///e"),
    journal=st.none() | st.just(Path("/a folder/journal")),
    poison=st.booleans(),
    log=st.builds(LogConfig, st.sampled_from(get_args(LogFormat)), st.sampled_from(get_args(LogLevel))),
)


@given(options_of_any_kind)
def test_the_environment_of_a_service_gives_it_the_same_options(options: ServerOptions) -> None:
    if options.num_blocks is not None:
        options = replace(options, kv_memory_bytes=None)
    assert read([], environment(options)) == options


def test_the_environment_hides_what_the_caller_had_set(monkeypatch: pytest.MonkeyPatch) -> None:
    options = read([])
    assert read([], {"KILBURN_NUM_BLOCKS": "5"} | environment(options)).num_blocks is None
