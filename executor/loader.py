"""Loads a decoder from a folder, with our attention inside, and finds out what a pool for it has to look like.

Knows folders, transformers and the model; not pools, plans or sampling. Code from a model's folder is never run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from executor import attention, families, probe
from executor.checkpoint import check_weights, name_some, read_config
from executor.families import Context
from kernels.interface import AttentionBackend, AttentionRule, CacheShape
from kilburn.config import Dtype
from kilburn.errors import StartError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was seen to work through block tables."""

    model: "PreTrainedModel"  # a PreTrainedModel whose attention is executor/attention.py's
    shape: CacheShape
    rules: tuple[AttentionRule, ...]
    context: Context  # the pool may allow less
    vocab_size: int  # ids that are tokens
    head_rows: int  # rows of the output head: at least vocab_size where a model pads its vocabulary

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Run the rows of one step and return the logits [wanted, vocab_size] of those wanted.

        Args:
            token_ids: [rows] int64.
            positions: [rows] int64, of each row in its own sequence.
            wanted: [n] int64, rows.
        """
        output = self.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted)
        logits: Tensor = output.logits[0]
        return logits[:, : self.vocab_size]


def load(
    folder: Path,
    *,
    device: torch.device,
    dtype: Dtype,
    backend: AttentionBackend[Any],
    block_size: int,
    max_model_len: int | None,
) -> LoadedModel:
    """Load the model in `folder`, which must be whole, and check that it can be served.

    Raises:
        StartError: the folder is damaged, or this kind of model can't be served; it says which file, tensor or kind.
    """
    config = _config(folder)
    families.check_family(config)
    model_class = families.model_class(config)
    context = _context(config, max_model_len)
    check_weights(folder)
    attention.register()
    model = _model(model_class, folder, config, device, dtype)
    try:
        seen = probe.observe(model, context.tokens)
        probe.check(model, seen, backend, block_size)
    except StartError as error:
        raise StartError(f"{config.model_type} models can't be served: {error}") from error
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return LoadedModel(
        model=model,
        shape=CacheShape(seen.layers, block_size, model.dtype),
        rules=seen.rules,
        context=context,
        vocab_size=min(vocabulary, seen.head_rows),
        head_rows=seen.head_rows,
    )


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
    model_class: type["PreTrainedModel"], folder: Path, config: "PreTrainedConfig", device: torch.device, dtype: Dtype
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
        )
        model = model.to(device).eval().requires_grad_(False)
    except Exception as error:
        raise StartError(f"{folder} can't be loaded: {_first_line(error)}") from error
    _check_loaded(folder, info)
    if model.dtype not in _DTYPES.values():
        raise StartError(f"{folder} holds {model.dtype} weights; give --dtype")
    return model


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
