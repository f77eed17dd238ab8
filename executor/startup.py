"""From a configuration to a runner that is ready for step 1: first the model, which says what a frame is, then the pool.

Knows all parts of the executor; not sockets. Imported late, after executor/clash.py has had its say, because it imports
transformers.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from executor import sizing
from executor.batch import Limits, Slots
from executor.fetch import ensure_model
from executor.loader import LoadedModel, load
from executor.pool import (
    HEADER_VERSION,
    Pool,
    PoolSpec,
    check_pool_dir,
    device_pool,
    free_bytes,
    pool_path,
    remove_leftover,
    shared_pool,
)
from executor.progress import Progress
from executor.runner import Runner
from kernels.interface import AttentionBackend
from kernels.registry import BackendError, choose
from kilburn.config import ExecutorConfig
from kilburn.errors import StartError
from kilburn.limits import MIB
from kilburn.log import Logger
from kilburn.models import fingerprint
from kilburn.v1.engine_pb2 import ModelInfo, PoolHeader

#: --max-step-tokens where it is auto: what a step can take before running streams feel it.
_CPU_STEP_TOKENS: Final = 256
_CUDA_STEP_TOKENS: Final = 2048

#: PoolHeader.model.dtype and ModelInfo.dtype.
_DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Ready:
    """An executor that can run plans, and what its hello says."""

    runner: Runner
    info: ModelInfo
    limits: Limits


@contextmanager
def ready(config: ExecutorConfig, incarnation: int, progress: Progress, log: Logger) -> Iterator[Ready]:
    """Load everything; the pool's file is removed at the end of the block.

    Raises:
        StartError: something is not there, is damaged, does not fit, or can't be served.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = find_device(config.device)
    try:
        choice = choose(config.attention, device)
    except BackendError as error:
        raise StartError(str(error)) from error
    backend = choice.backend
    if choice.why_slower:
        log.warning("attention is slower than it could be", attention=backend.name, reason=choice.why_slower)
    if device.type == "cpu":
        if config.pool_dir is not None:
            check_pool_dir(config.pool_dir)
        # Before the memory that is free is looked at: else each crash would leave the next executor a smaller pool.
        remove_leftover(pool_path(config.pool_dir, config.runtime_dir))
    folder = ensure_model(config.model)
    model = load(
        folder,
        device=device,
        dtype=config.dtype,
        backend=backend,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        forward=config.forward,
    )
    size = _pool_size(config, model, backend)
    info = _model_info(config, model, backend, folder, size.blocks)
    with _pool(config, model, backend, info, incarnation) as pool:
        limits = Limits(
            num_blocks=info.total_blocks,
            block_size=info.block_size,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            max_slots=config.max_running,
            max_step_tokens=config.max_step_tokens or (_CPU_STEP_TOKENS if device.type == "cpu" else _CUDA_STEP_TOKENS),
            host_blocks=pool.host_blocks,
        )
        runner = Runner(
            model=model,
            backend=backend,
            pool=pool,
            slots=Slots(limits),
            progress=progress,
            clock_ns=time.perf_counter_ns,
            poison=config.poison,
            max_step_tokens=limits.max_step_tokens,
        )
        log.info(
            "ready",
            model=info.name,
            dtype=info.dtype,
            device=info.device,
            attention=info.attention_backend,
            instructions=choice.instructions or None,
            threads=torch.get_num_threads(),
            context=info.context_length,
            context_set_by=model.context.set_by if info.context_length == model.context.tokens else "the pool",
            blocks=info.total_blocks,
            block_size=info.block_size,
            pool_mib=round(pool.spec.bytes / MIB, 1),
            pool_sized_by=size.reason,
            pool_file=str(pool.path),
            host_blocks=pool.host_blocks,
            weights_mib=round(model.weights_bytes / MIB, 1),
            forward="fast" if model.fused else "general",
            forward_because=model.why_general or None,
        )
        yield Ready(runner, info, limits)


def find_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        StartError: there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind == "cpu" and not number:
        return torch.device("cpu")
    if kind != "cuda" or (number and not (number.isascii() and number.isdigit())):
        raise StartError(f"--device {name}: write auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise StartError(f"--device {name}: torch {torch.__version__} finds no NVIDIA GPU here")
    if int(number or 0) >= torch.cuda.device_count():
        raise StartError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", int(number or 0))


def _pool_size(config: ExecutorConfig, model: LoadedModel, backend: AttentionBackend[Any]) -> sizing.Size:
    demand = sizing.Demand(
        frame_bytes=backend.layout(model.shape).frame_bytes(model.shape.dtype),
        num_blocks=config.num_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        most_useful_blocks=config.max_running * -(-model.context.tokens // config.block_size),
    )
    if model.device.type == "cpu":
        return sizing.cpu_blocks(demand, sizing.free_memory_bytes(), free_bytes(config.pool_dir))
    return sizing.cuda_blocks(demand, torch.cuda.mem_get_info(model.device)[0])


def _model_info(
    config: ExecutorConfig, model: LoadedModel, backend: AttentionBackend[Any], folder: Path, blocks: int
) -> ModelInfo:
    return ModelInfo(
        name=folder.resolve().name if Path(config.model).expanduser().is_dir() else config.model,
        fingerprint=fingerprint(folder),
        context_length=min(model.context.tokens, blocks * config.block_size),
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        total_blocks=blocks,
        bytes_per_block=backend.layout(model.shape).frame_bytes(model.shape.dtype),
        dtype=_DTYPE_NAMES[model.shape.dtype],
        device=str(model.device),
        attention_backend=backend.name,
    )


@contextmanager
def _pool(
    config: ExecutorConfig, model: LoadedModel, backend: AttentionBackend[Any], info: ModelInfo, incarnation: int
) -> Iterator[Pool]:
    layout = backend.layout(model.shape)
    header = PoolHeader(version=HEADER_VERSION, model=info, layout=layout.name, executor_incarnation=incarnation)
    spec = PoolSpec(info.total_blocks, layout.elements, model.shape.dtype)
    sizing.check_host(config.host_blocks, spec.frame_bytes, spec.bytes if model.device.type == "cpu" else 0)
    if model.device.type == "cpu":
        pool = shared_pool(spec, pool_path(config.pool_dir, config.runtime_dir), header)
    else:
        pool = device_pool(spec, model.device, header)
    try:
        pool.add_host(config.host_blocks)
        if config.poison:
            pool.poison()
        yield pool
    finally:
        pool.close()
