"""Reading addresses and sizes, finding models, the errors' one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn import models
from kilburn.config import DEFAULT_MODEL, Address, check_block_size, parse_address, parse_bytes
from kilburn.errors import StartError

# ------------------------------------------------------------------------------------------------------ addresses


@given(st.sampled_from(["127.0.0.1", "localhost", "::1", "fe80::1", "0.0.0.0", "a-b.example"]), st.integers(0, 65535))
def test_an_address_is_read_as_it_is_written(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize(
    "text", ["", ":", "50051", "host", "host:", ":50051", "host:-1", "host:65536", "host:٣", "::1:5", "[::1]", "host:5 "]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(StartError, match="HOST:PORT"):
        parse_address(text)


@given(st.text())
def test_any_text_is_an_address_or_a_start_error(text: str) -> None:
    try:
        address = parse_address(text)
    except StartError:
        return
    assert 0 <= address.port <= 65535
    assert address.host


# ---------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("2GiB", 2**31), ("512MiB", 2**29), (" 1.5 kib ", 1536), ("3GB", 3 * 10**9), ("1TiB", 2**40), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "0GiB", "0.1", "-1GiB", "GiB", "1 GiB 2", "1PiB", "1e9", "nan", "1,5GiB", "٣GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(StartError, match="2GiB"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_whole_bytes(count: int) -> None:
    assert parse_bytes(str(count)) == count


@pytest.mark.parametrize("size", [1, 7, 16, 1024])
def test_block_sizes(size: int) -> None:
    assert check_block_size(size) == size


@pytest.mark.parametrize("size", [0, -1, 1025])
def test_what_is_no_block_size(size: int) -> None:
    with pytest.raises(StartError, match="1 to 1024"):
        check_block_size(size)


# --------------------------------------------------------------------------------------------------------- models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_folder_with_a_config_is_a_model(cache: Path) -> None:
    with pytest.raises(StartError, match=r"no config\.json"):
        models.find_model(str(cache))
    (cache / "config.json").write_text("{}")
    assert models.find_model(str(cache)) == cache


def test_the_default_model_counts_once_it_is_complete(cache: Path) -> None:
    folder = models.default_model_dir()
    assert folder == cache / "cache" / "models" / DEFAULT_MODEL
    assert models.find_model(DEFAULT_MODEL) is None
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert models.find_model(DEFAULT_MODEL) is None
    (folder / models.COMPLETE_MARK).touch()
    assert models.find_model(DEFAULT_MODEL) == folder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gguf", "is no model folder: it holds a GGUF file, and Kilburn loads safetensors"),
        ("gguf/model.Q4_1.gguf", "this is a GGUF file, and Kilburn loads safetensors from a folder"),
        ("notes.txt", "this is a file, and no folder"),
    ],
)
def test_what_is_no_folder_of_safetensors_is_refused_for_what_it_is(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.Q4_1.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(StartError, match=reason):
        models.find_model(str(tmp_path / name))


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "~/nowhere-at-all", "one-word", "a/b/c", "-/.."])
def test_what_is_no_model(cache: Path, name: str) -> None:
    with pytest.raises(StartError, match="there is no such folder"):
        models.find_model(name)


def test_a_hub_name_that_was_not_downloaded(cache: Path) -> None:
    assert models.find_model("owner/model") is None


def test_fingerprints_tell_configurations_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1}))
    one = models.fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 2}))
    assert len(one) == 64
    assert models.fingerprint(tmp_path) != one
    (tmp_path / "config.json").unlink()
    with pytest.raises(StartError, match="can't read"):
        models.fingerprint(tmp_path)
