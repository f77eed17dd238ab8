"""Where the processes of an instance meet: private folders, short socket paths, one process for each role."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import StartError
from kilburn.limits import MAX_SOCKET_PATH_BYTES
from kilburn.wire import endpoints
from kilburn.wire.sockets import router

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=120)
folders = names.map(lambda name: Path("/r") / name)


@given(folders)
def test_sockets_have_paths_that_fit_and_are_found_again(runtime_dir: Path) -> None:
    for endpoint in (endpoints.gateway_endpoint(runtime_dir), endpoints.executor_endpoint(runtime_dir)):
        assert len(os.fsencode(endpoint.removeprefix("ipc://"))) <= MAX_SOCKET_PATH_BYTES
        assert endpoints.check_endpoint(endpoint) == endpoint
        assert endpoints.ipc_folder(endpoint) == endpoints.socket_dir(runtime_dir)


@given(folders, folders)
def test_two_instances_share_no_socket(one: Path, other: Path) -> None:
    assert (one == other) == (endpoints.gateway_endpoint(one) == endpoints.gateway_endpoint(other))
    assert (one == other) == (endpoints.instance_id(one) == endpoints.instance_id(other))


def test_the_longest_path_can_be_bound(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    room = MAX_SOCKET_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    assert room > 0, "the test's own folder is too long"
    endpoint = endpoints.check_endpoint(f"ipc://{tmp_path}/{'s' * room}")
    router(context, endpoint).close()
    with pytest.raises(StartError, match="107 bytes"):
        endpoints.check_endpoint(endpoint + "s")
    context.term()


@pytest.mark.parametrize("endpoint", ["", "ipc://", "/run/x", "tcp://127.0.0.1:5", "inproc://x"])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(StartError):
        endpoints.check_endpoint(endpoint)


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert endpoints.default_runtime_dir() == tmp_path / "kilburn"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert endpoints.default_runtime_dir().name == f"kilburn-{os.getuid()}"


def test_a_private_folder_is_made_and_closed_to_others(tmp_path: Path) -> None:
    made = endpoints.private_dir(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    endpoints.private_dir(made)
    assert made.stat().st_mode & 0o777 == 0o700


def test_no_link_and_no_file_is_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "file/below"):
        with pytest.raises(StartError):
            endpoints.private_dir(tmp_path / name)


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to give a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, -1)
    with pytest.raises(StartError, match="belongs to another user"):
        endpoints.private_dir(theirs)


def test_a_role_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with endpoints.lock(tmp_path, "memmgr"):
        with pytest.raises(StartError, match=rf"process {os.getpid()}\) already uses"):
            endpoints.lock(tmp_path, "memmgr")
        with endpoints.lock(tmp_path, "executor"):
            pass
    assert not list(tmp_path.iterdir())
    with endpoints.lock(tmp_path, "memmgr"):
        pass


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, os, pathlib; from kilburn.wire import endpoints; "
        "held = endpoints.lock(pathlib.Path(sys.argv[1]), 'memmgr'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    assert (tmp_path / "memmgr.lock").exists()
    with endpoints.lock(tmp_path, "memmgr"):
        pass


def test_a_lock_on_a_file_that_was_removed_holds_nothing(tmp_path: Path) -> None:
    """Two processes take turns very fast: at no time do both hold the role."""
    script = """
import sys, pathlib
from kilburn.errors import StartError
from kilburn.wire import endpoints
folder, held = pathlib.Path(sys.argv[1]), 0
for _ in range(1000):
    try:
        with endpoints.lock(folder, "memmgr"):
            (folder / "holder").touch(exist_ok=False)
            (folder / "holder").unlink()
            held += 1
    except StartError:
        continue
assert held
"""
    racers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(2)]
    assert [racer.wait(60) for racer in racers] == [0, 0]


def test_an_address_is_published_whole(tmp_path: Path) -> None:
    assert endpoints.publish_address(tmp_path, "gateway", "127.0.0.1:5").read_text() == "127.0.0.1:5\n"
    assert [path.name for path in tmp_path.iterdir()] == ["gateway.address"]
