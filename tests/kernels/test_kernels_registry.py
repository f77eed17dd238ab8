"""Backends by name: which is taken, which is refused where, and what is said where the best one can't be had."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch

from cli.commands import kilburn
from kernels.cpu import build, library
from kernels.registry import NAMES, BackendError, choose
from tests.kernels.backends import need_cpu_library, need_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_the_reference_works_on_every_device() -> None:
    for device in CPU, CUDA:
        choice = choose("reference", device)
        assert (choice.backend.name, choice.why_slower) == ("reference", "")


@pytest.mark.parametrize(("name", "device"), [("auto", CPU), ("cpu", CPU), ("auto", CUDA), ("triton", CUDA)])
def test_each_kind_of_device_has_its_own(name: str, device: torch.device) -> None:
    if device is CPU:
        need_cpu_library()
    else:
        need_triton()
    choice = choose(name, device)
    assert choice.backend.name == {"cpu": "cpu", "cuda": "triton"}[device.type]
    assert choice.why_slower == ""


@pytest.mark.parametrize(("name", "device"), [("cpu", CUDA), ("triton", CPU)])
def test_a_backend_is_refused_on_a_device_that_it_does_not_work_on(name: str, device: torch.device) -> None:
    needs = {"cpu": "a CPU", "triton": "an NVIDIA GPU"}[name]
    reason = f"--attention {name} needs {needs}, and the device is {device}; leave --attention out for the best that works here"
    with pytest.raises(BackendError, match=f"^{reason}"):
        choose(name, device)


@pytest.mark.parametrize("found", [False, True])
def test_where_torch_finds_no_gpu_it_says_what_to_look_at(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    with pytest.raises(BackendError) as refused:
        choose("triton", CPU)
    hint = f"torch {torch.__version__} does not find it: see nvidia-smi, and install torch for CUDA"
    assert (hint in str(refused.value)) != found
    with pytest.raises(BackendError) as refused:
        choose("cpu", CUDA)
    assert hint not in str(refused.value)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "they were not compiled: run `make compile`")


@pytest.mark.usefixtures("no_library")
def test_without_its_library_cpu_is_refused_by_name() -> None:
    with pytest.raises(
        BackendError, match=r"^the native kernels for CPUs can't be used: they were not compiled: run `make compile`$"
    ):
        choose("cpu", CPU)


@pytest.mark.usefixtures("no_library")
def test_without_its_library_auto_takes_the_reference_and_says_why() -> None:
    choice = choose("auto", CPU)
    assert choice.backend.name == "reference"
    assert choice.why_slower.startswith(
        "the native kernels for CPUs can't be used: they were not compiled: run `make compile`; until then"
    )


@pytest.mark.parametrize(
    ("maps", "reason"),
    [
        (None, r"maps, which tells whose threads torch uses, can't be read: No such file or directory"),
        (
            "7f00-7fff r-xp 00000000 08:01 77   /opt/torch/lib/libtorch_cpu.so (deleted)\n",
            r"/opt/torch/lib/libtorch_cpu\.so was replaced since this process loaded it: start it again",
        ),
        (
            "7f00-7fff r-xp 00000000 08:01 77   /opt/torch/lib/libtorch_cpu.so\n",
            r"torch's own library, which is loaded, can't be found again: /opt/torch/lib/libtorch_cpu\.so",
        ),
    ],
    ids=["no maps", "deleted", "not loaded"],
)
def test_where_torchs_threads_cannot_be_found_auto_takes_the_reference_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: str | None, reason: str
) -> None:
    need_cpu_library()
    if maps is not None:
        (tmp_path / "maps").write_text(maps)
    monkeypatch.setattr(library, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr(library, "load", lambda: library.load_from(build.COMPILED))
    with pytest.raises(BackendError, match=f"^the native kernels for CPUs can't be used: .*{reason}"):
        choose("cpu", CPU)
    choice = choose("auto", CPU)
    assert choice.backend.name == "reference"
    assert re.match(f"the native kernels for CPUs can't be used: .*{reason}.*; until then attention is plain", choice.why_slower)


def test_without_openmp_the_cpus_is_taken_and_says_that_it_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cpu_library()
    alone = replace(library.load(), openmp=None, why_one_thread="there is no OpenMP")
    monkeypatch.setattr(library, "load", lambda: alone)
    choice = choose("auto", CPU)
    assert choice.backend.name == "cpu"
    assert choice.why_slower == "the native kernels have one thread only: there is no OpenMP"


def test_without_triton_auto_takes_the_reference_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendError, match=r"the Triton kernels can't be used: .*; install torch for CUDA"):
        choose("triton", CUDA)
    choice = choose("auto", CUDA)
    assert choice.backend.name == "reference"
    assert "the Triton kernels can't be used" in choice.why_slower


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(BackendError, match="--attention flash: there is no such backend; one of auto, triton, cpu, reference"):
        choose("flash", CPU)


def test_the_command_line_knows_the_same_names() -> None:
    up = kilburn.get_command(click.Context(kilburn), "up")
    assert up is not None
    (option,) = [option for option in up.params if option.name == "attention"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == NAMES
