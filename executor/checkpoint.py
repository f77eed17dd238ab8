"""Checks a model's folder before anything is loaded from it: damage is told by the file's and the tensor's name, in no time.

Knows config.json as JSON and safetensors files by their headers; not models.
"""

import json
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from kilburn.errors import StartError

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"

#: Of config.json and of an index: the largest index seen (a thousand shards) is under 20 MiB.
_MAX_JSON_BYTES: Final = 64 * 1024 * 1024

#: Named in an error; the others are counted.
_MAX_NAMED: Final = 3


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        StartError: it is missing, no JSON, names no kind of model, or names weights of a kind that Kilburn does not load.
    """
    config = _read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise StartError(f"{folder / 'config.json'} names no model_type")
    if "quantization_config" in config:
        method = (config["quantization_config"] or {}).get("quant_method", "unknown")
        raise StartError(f"{folder} holds weights quantized by {method}; Kilburn loads float32, bfloat16 and float16")
    return config


def check_weights(folder: Path) -> None:
    """Check that every weight file is there, whole, and holds what the index says.

    Raises:
        StartError: one is not.
    """
    index = folder / _INDEX
    if (folder / _SINGLE).is_file():
        _tensor_names(folder / _SINGLE)
        return
    if not index.is_file():
        if (folder / "adapter_config.json").is_file():
            raise StartError(f"{folder} is an adapter; merge it into its base model first")
        others = "; a GGUF file is not loaded" if any(folder.glob("*.gguf")) else ""
        raise StartError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}{others}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StartError(f"{index} has no weight_map of tensor names to files")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise StartError(f"{index} names a file outside of its folder: {name!r}")
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        missing = listed - _tensor_names(folder / name)
        if missing:
            raise StartError(f"{folder / name} lacks {name_some(missing)}, which {_INDEX} promises")


def name_some(names: set[str]) -> str:
    """Return a few names for a message, and the number of the others."""
    first = sorted(names)[:_MAX_NAMED]
    rest = len(names) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")


def _tensor_names(path: Path) -> set[str]:
    """Return the names in a safetensors file, whose header is checked against its size."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except FileNotFoundError as error:
        raise StartError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise StartError(f"{path} is damaged: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise StartError(f"{path} is longer than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path} is damaged: it holds no object")
    return value
