"""What is wrong on the command line: one line on standard error, exit status 2, at once."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import click
import grpc
import pytest

from cli.commands import kilburn as every_command
from cli.main import main
from tests.cli.cli_help import ROOT, kilburn


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run a command in this process; return its status and its one line."""
    status = main(words)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("kilburn: ")
    return status, err


@pytest.mark.parametrize("role", ["up", "memmgr", "executor", "gateway"])
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["surplus"], "surplus"),
        (["--block-size", "0"], "1 to 1024"),
        (["--block-size", "1025"], "1 to 1024"),
        (["--block-size", "sixteen"], "'sixteen'"),
        (["--num-blocks", "0"], "--num-blocks"),
        (["--num-blocks", "4", "--kv-memory", "1GiB"], "--kv-memory"),
        (["--kv-memory", "2 bananas"], "2GiB"),
        (["--device", "tpu"], "cuda:N"),
        (["--dtype", "int4"], "--dtype"),
        (["--attention", "flash"], "--attention"),
        (["--attention", "triton", "--device", "cpu"], "needs an NVIDIA GPU, and --device is cpu; leave one of the two out"),
        (["--attention", "cpu", "--device", "cuda:1"], "cuda:1"),
        (["--preemption", "swap"], "--host-blocks"),
        (["--host-blocks", "9"], "--preemption swap"),
        (["--preemption", "drop"], "--preemption"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--max-running", "-1"], "--max-running"),
        (["--listen", "50051"], "HOST:PORT"),
        (["--listen", "127.0.0.1:65536"], "HOST:PORT"),
        (["--listen", "127.0.0.1:7", "--admin", "127.0.0.1:7"], "both"),
        (["--gateway-endpoint", "tcp://127.0.0.1:7"], "ipc://"),
        (["--gateway-endpoint", "ipc://" + "x" * 108], "107"),
        (["--gateway-endpoint", "ipc:///x", "--executor-endpoint", "ipc:///x"], "the same"),
        (["--log-level", "loud"], "--log-level"),
        (["--runtime-dir", ""], "--runtime-dir"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], role: str, words: list[str], part: str) -> None:
    status, line = said(capsys, role, *words)
    assert status == 2
    assert part in line


def test_a_bad_variable_is_as_bad_as_a_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_BLOCK_SIZE", "-3")
    status, line = said(capsys, "memmgr")
    assert status == 2
    assert "-3" in line


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-command"],
        ["generate"],
        ["generate", "--system", "be brief", "hello"],
        ["sequences", "--request-id", "a", "--state", "decode"],
        ["probe"],
        ["probe", "--text", "a", "--ids", "1"],
        ["probe", "--ids", "1,x"],
        ["pins", "--unpin", "a", "--ids", "1"],
        ["quotas", "set"],
        ["quotas", "set", "a"],
        ["quotas", "set", "a", "--max-blocks", "-1"],
        ["quotas", "drop", "a"],
        ["events", "--kind", "lost"],
        ["explain", "-1"],
        ["health", "database"],
    ],
)
def test_bad_commands(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert said(capsys, *words)[0] == 2


@pytest.mark.parametrize("command", [["up"], ["executor"]])
def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]) -> None:
    flags = ["--runtime-dir", str(tmp_path / "run"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    status, line = said(capsys, *command, *flags, "--model", str(tmp_path / "nothing"))
    assert status == 2
    assert "there is no such folder" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["pool"],
        ["sequences"],
        ["blocks"],
        ["verify"],
        ["cancel", "a"],
        ["prefixes"],
        ["events"],
        ["explain", "1"],
        ["probe", "--ids", "1"],
        ["pins"],
        ["quotas"],
        ["quotas", "set", "a", "--max-blocks", "1"],
    ],
)
def test_no_server(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    status, line = said(capsys, *command, "--admin-server", "127.0.0.1:1")
    assert status == 1
    assert line == (
        "kilburn: no memory manager answers at 127.0.0.1:1; `kilburn up` starts one, --admin-server says where another one is\n"
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["probe"], "one of --text and --ids is needed"),
        (["probe", "--text", "a", "--ids", "1"], "--text and --ids exclude each other"),
        (["quotas", "set", "a"], "--max-blocks 0 alone takes the quota away"),
        (["explain", "abc"], "'abc' is no whole number"),
        (["generate", "a", "--priority", "x"], "'x' is no whole number"),
        (["generate", "a", "--top-k", "1.5"], "'1.5' is no whole number"),
        (["generate", "a", "--min-p", "x"], "'x' is no number"),
        (["generate", "a", "--deadline", "x"], "'x' is no number"),
        (["generate", "a", "--deadline", "nan"], "'nan' is no number"),
        (["memmgr", "--max-running", "many"], "'many' is no whole number"),
        (["memmgr", "--block-size", "many"], "'many' is no whole number"),
        (["generate", "a", "--server", "nonsense"], "'--server': 'nonsense' is no address; write HOST:PORT"),
        (["pool", "--admin-server", "nonsense"], "'--admin-server': 'nonsense' is no address; write HOST:PORT"),
    ],
)
def test_what_is_wrong_is_said_in_the_same_words_everywhere(
    capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    status, line = said(capsys, *words)
    assert status == 2
    assert part in line


@pytest.mark.parametrize("name", ["none/journal", "file/journal"])
def test_a_journal_that_can_not_be_ends_up_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    status, line = said(capsys, "up", "--runtime-dir", str(tmp_path / "run"), "--journal", str(tmp_path / name))
    path = tmp_path / name
    assert (status, line) == (2, f"kilburn: --journal {path}: there is no folder {path.parent}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("role", "flag"), [("gateway", "--listen"), ("memmgr", "--admin")])
def test_the_health_of_what_is_not_there(capsys: pytest.CaptureFixture[str], role: str, flag: str) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["health", role, flag, "127.0.0.1:1"])
    assert capsys.readouterr().err == (
        f"kilburn: {role}: nothing answers at 127.0.0.1:1; `kilburn up` starts one, {flag} says where another one is\n"
    )


@pytest.mark.parametrize(
    ("words", "service", "flag"),
    [(["pool"], "memory manager", "--admin-server"), (["generate", "a"], "gateway", "--server")],
)
def test_the_other_server(capsys: pytest.CaptureFixture[str], words: list[str], service: str, flag: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    status, line = said(capsys, *words, flag, f"127.0.0.1:{port}")
    server.stop(0).wait()
    assert status == 1
    assert line.startswith(f"kilburn: what answers at 127.0.0.1:{port} is no {service}; it may be the other server: {flag} is")


def test_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    status, line = said(capsys, "generate", "hello", "--server", "127.0.0.1:1")
    assert status == 1
    assert line.startswith("kilburn: no gateway answers at 127.0.0.1:1; ")


def test_help_is_quick_and_complete() -> None:
    before = getrusage(RUSAGE_CHILDREN)
    done = kilburn("--help")
    after = getrusage(RUSAGE_CHILDREN)
    assert done.returncode == 0
    for command in ("up", "memmgr", "executor", "gateway", "generate", "pool", "sequences", "blocks", "verify", "health"):
        assert f"\n  {command}" in done.stdout
    # A tenth of what importing torch or transformers takes; processor time, for a machine that is busy with other things.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_memmgr_needs_neither_torch_nor_the_other_services() -> None:
    script = "import sys, cli.commands, cli.services, memmgr.service; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "memmgr.service" in modules
    assert not {"torch", "transformers", "numpy", "gateway", "executor"} & set(modules)


def test_every_option_says_what_it_does() -> None:
    context = click.Context(every_command)
    commands = [every_command.get_command(context, name) for name in every_command.list_commands(context)]
    options = [(command.name, one) for command in commands if command for one in command.params if isinstance(one, click.Option)]
    assert len(options) > 100
    assert [(name, option.opts) for name, option in options if not option.help] == []


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "max_tokens"])
def test_what_shapes_an_answer_says_its_meaning_and_its_default(name: str) -> None:
    command = every_command.get_command(click.Context(every_command), "generate")
    assert command is not None
    option = next(option for option in command.params if option.name == name)
    assert isinstance(option, click.Option)
    meaning, found, default = (option.help or "").partition(" Default: ")
    assert (len(meaning.split()) > 5, found, default[-1:]) == (True, " Default: ", ".")
