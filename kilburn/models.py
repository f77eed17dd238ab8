"""Where models lie: from the name that a user gives to a folder on disk, without torch.

Knows folders and their config.json; fetching and converting is `executor/fetch.py`, tokenizers are the gateway's, weights the
executor's.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

import platformdirs

from kilburn.config import DEFAULT_MODEL
from kilburn.errors import StartError

#: Written last into a converted folder: without it the conversion was cut short and is done again.
COMPLETE_MARK: Final = "kilburn-complete"


def cache_dir() -> Path:
    """Return the folder for converted models: KILBURN_CACHE, else `kilburn` in the user's cache folder."""
    chosen = os.environ.get("KILBURN_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("kilburn"))


def default_model_dir() -> Path:
    """Return where the default model lies once it was converted."""
    return cache_dir() / "models" / DEFAULT_MODEL


def find_model(name: str) -> Path | None:
    """Return the folder of a model that is on this machine, or None where it has to be fetched first.

    Raises:
        StartError: `name` is a path to something that is no model folder, or is no name that could be fetched.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            what = "it holds a GGUF file, and Kilburn loads safetensors" if any(path.glob("*.gguf")) else "it has no config.json"
            raise StartError(f"{path} is no model folder: {what}")
        return path
    if path.is_file():
        what = "a GGUF file, and Kilburn loads safetensors from a folder" if path.suffix == ".gguf" else "a file, and no folder"
        raise StartError(f"--model {name}: this is {what}")
    if name == DEFAULT_MODEL:
        folder = default_model_dir()
        return folder if (folder / COMPLETE_MARK).is_file() else None
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise StartError(f"--model {name}: there is no such folder")
    return _cached_from_hub(name)


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of a model's config.json, in hex: two processes with equal ones speak of the same model.

    Raises:
        StartError: config.json can't be read.
    """
    try:
        return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    except OSError as error:
        raise StartError(f"can't read {folder / 'config.json'}: {error.strerror}") from error


def _cached_from_hub(name: str) -> Path | None:
    """Return the folder of a hub's model that an earlier run downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise StartError(f"--model {name}: there is no such folder, and it is no hub name") from error
