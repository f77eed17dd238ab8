"""Loads a decoder from a folder, with our attention inside, and finds out what a pool for it has to look like.

Knows folders, transformers and the model; not pools, plans or sampling. Code from a model's folder is never run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from executor import attention, families, probe
from executor.checkpoint import check_weights, name_some, read_config
from executor.families import Context
from executor.forward import Forward, GeneralForward
from executor.fused import FusedForward, FusedWeights, pack_all
from executor.packed import exchange
from executor.progress import Progress
from executor.recipe import NoRecipeError, read
from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionBackend, AttentionRule, CacheShape, KvCache
from kilburn.config import Dtype, ForwardPath
from kilburn.errors import StartError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was seen to work through block tables, as one of transformers or as fused weights."""

    model: "PreTrainedModel | None"  # its attention is executor/attention.py's
    fused: FusedWeights | None
    why_general: str  # why there are no fused weights, or that they are not wanted
    device: torch.device
    shape: CacheShape
    rules: tuple[AttentionRule, ...]
    context: Context  # the pool may allow less
    vocab_size: int  # ids that are tokens
    head_rows: int  # rows of the output head: at least vocab_size where a model pads its vocabulary

    @property
    def weights_bytes(self) -> int:
        """What the weights take."""
        if self.fused is not None:
            return self.fused.bytes
        assert self.model is not None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        # Of a parameter that is split, this rank's share.
        return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)

    def forward(self, backend: AttentionBackend[Any], cache: KvCache, most_rows: int, progress: Progress) -> Forward:
        """Return what runs steps of at most so many rows over this pool."""
        if self.fused is not None:
            assert isinstance(backend, CpuBackend)
            return FusedForward(self.fused, backend, cache, self.rules, most_rows, progress.layer_cell)
        assert self.model is not None
        return GeneralForward(self.model, backend, cache, self.rules, progress.at_layer)


def load(
    folder: Path,
    *,
    device: torch.device,
    dtype: Dtype,
    backend: AttentionBackend[Any],
    block_size: int,
    max_model_len: int | None,
    forward: ForwardPath = "auto",
    world: int = 1,
) -> LoadedModel:
    """Load the model in `folder`, which must be whole, and check that it can be served.

    Where `world` is 2 or more, this is one rank's share of it, and all ranks load at once: `torch.distributed` is up.

    Raises:
        StartError: the folder is damaged, or this kind of model can't be served; it says which file, tensor or kind.
    """
    config = _config(folder)
    families.check_family(config)
    model_class = families.model_class(config)
    context = _context(config, max_model_len)
    check_weights(folder)
    attention.register()
    if world > 1:
        families.check_parallel(config, world)
    model = _model(model_class, folder, config, device, dtype, world)
    try:
        seen = probe.observe(model, context.tokens)
        trial = probe.expect(model, seen)
        probe.check(
            trial, backend, block_size, lambda cache: GeneralForward(model, backend, cache, seen.rules, at_layer=lambda _: None)
        )
    except StartError as error:
        raise StartError(f"{config.model_type} models can't be served: {error}") from error
    vocabulary = config.get_text_config(decoder=True).vocab_size
    device = model.device
    if world == 1:
        fused, why_general = _fuse(model, backend, context.tokens, forward)
    else:
        fused, why_general = None, f"it is shared by {world} ranks"
        if max(layer.kv_heads for layer in seen.layers) * world > families.most_kv_heads(config):
            why_general += ", though by its plan each computes and holds the K and V of all heads"
    if fused is not None:
        _check_fused(fused, trial, backend, block_size)
    elif isinstance(backend, CpuBackend) and world == 1:  # a rank's weights are parts, and its modules have hooks
        why_general += _pack(model, trial, backend, block_size)
    return LoadedModel(
        model=model if fused is None else None,
        fused=fused,
        why_general=why_general,
        device=device,
        shape=CacheShape(seen.layers, block_size, trial.dtype),
        rules=seen.rules,
        context=context,
        vocab_size=min(vocabulary, seen.head_rows),
        head_rows=seen.head_rows,
    )


def _fuse(
    model: "PreTrainedModel", backend: AttentionBackend[Any], positions: int, wanted: ForwardPath
) -> tuple[FusedWeights | None, str]:
    """Return the model's weights for the fast path, which takes them from it, or why it keeps them.

    Raises:
        StartError: the fast path is asked for by name, and there is none.
    """
    if wanted == "general":
        return None, "it was asked for"
    try:
        if not isinstance(backend, CpuBackend):
            raise NoRecipeError(f"the fast path needs --attention cpu, and this is {backend.name}")
        if model.dtype not in (torch.float32, torch.bfloat16):
            raise NoRecipeError("the fast path is for bfloat16 and float32")
        return pack_all(read(model, positions)), ""
    except NoRecipeError as error:
        if wanted == "fast":
            raise StartError(f"--forward fast can't be had: {error}") from error
        return None, str(error)


def _check_fused(fused: FusedWeights, trial: probe.Trial, backend: AttentionBackend[Any], block_size: int) -> None:
    assert isinstance(backend, CpuBackend)
    rows, rules = probe.most_rows(trial), trial.seen.rules
    try:
        probe.check(
            trial, backend, block_size, lambda cache: FusedForward(fused, backend, cache, rules, rows, Progress().layer_cell)
        )
    except StartError as error:
        raise StartError(f"the fast path does not give this model's numbers; give --forward general ({error})") from error


def _pack(model: "PreTrainedModel", trial: probe.Trial, backend: CpuBackend, block_size: int) -> str:
    """Let the general path's products be of packed weights; return what is to be said of it, where the model can't have them."""
    exchanged = exchange(model, backend.instructions)
    if not len(exchanged):
        return ""
    try:
        probe.check(
            trial,
            backend,
            block_size,
            lambda cache: GeneralForward(model, backend, cache, trial.seen.rules, at_layer=lambda _: None),
        )
    except StartError as error:
        exchanged.undo()
        return f"; its products are torch's, as with packed weights it fails: {error}"
    return ""


def _config(folder: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    raw = read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if "auto_map" in raw:
            reason = f"{raw['model_type']} models need Python code from their folder, which Kilburn never runs"
            raise StartError(f"{folder} can't be used: {reason}") from error
        raise StartError(f"{folder / 'config.json'} can't be used: {_first_line(error)}") from error


def _context(config: "PreTrainedConfig", max_model_len: int | None) -> Context:
    limits = families.context_limits(config)
    if max_model_len is not None:
        limits.append(Context(max_model_len, "--max-model-len"))
    if not limits:
        raise StartError(f"this {config.model_type} model does not say how long its context is; give --max-model-len")
    return min(limits, key=lambda limit: limit.tokens)


def _model(
    model_class: type["PreTrainedModel"],
    folder: Path,
    config: "PreTrainedConfig",
    device: torch.device,
    dtype: Dtype,
    world: int,
) -> "PreTrainedModel":
    try:
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=_DTYPES.get(dtype, "auto"),
            attn_implementation=attention.PAGED,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are listed then, and refused by name below
            output_loading_info=True,
            **_parallel(world),
        )
        model = model.to(device).eval().requires_grad_(False)
    except Exception as error:
        raise StartError(f"{folder} can't be loaded: {_first_line(error)}") from error
    _check_loaded(folder, info)
    if model.dtype not in _DTYPES.values():
        raise StartError(f"{folder} holds {model.dtype} weights; give --dtype")
    return model


def _parallel(world: int) -> dict[str, Any]:
    """Return what makes transformers load one rank's share of a model, by the model's own plan."""
    if world == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=world, tp_plan="auto")}


def _check_loaded(folder: Path, info: dict[str, Any]) -> None:
    """Refuse weights that transformers would have made up.

    Raises:
        StartError: a tensor is missing, or has another shape than the configuration asks for.
    """
    if info["missing_keys"]:
        raise StartError(f"{folder} lacks the tensor {name_some(set(info['missing_keys']))}")
    if info["mismatched_keys"]:
        names = {str(key[0] if isinstance(key, (tuple, list)) else key) for key in info["mismatched_keys"]}
        raise StartError(f"{folder}: {name_some(names)} has another shape than config.json says")
    if info.get("error_msgs"):
        raise StartError(f"{folder} can't be loaded: {info['error_msgs'][0]}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
