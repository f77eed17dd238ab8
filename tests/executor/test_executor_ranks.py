"""Two ranks: what they say to each other arrives, and their shares of a model together are the model."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from executor import families, probe
from executor.loader import load
from executor.parallel import Lead, follow
from executor.ranks import MEETING, Ranks
from kernels.registry import create
from kilburn.errors import StartError
from kilburn.v1.engine_pb2 import Inspection, SlotState, StepPlan
from kilburn.v1.ranks_pb2 import RankCommand
from tests.executor.executor_help import save_tiny

#: The family, and the KV heads of each of two ranks where there are four: Phi 3's plan splits no attention.
FAMILIES: dict[str, tuple[Mapping[str, object], int]] = {
    "Llama": ({}, 2),
    "Qwen2": ({}, 2),
    "Qwen3": ({"head_dim": 8}, 2),
    "Gemma2": ({"head_dim": 8}, 2),
    "Mixtral": ({"num_local_experts": 4}, 2),
    "Phi3": ({}, 4),
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}


@pytest.mark.processes
def test_the_shares_of_two_ranks_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    folders = [save_tiny(tmp_path / name, name, {**HEADS, **options}) for name, (options, _) in FAMILIES.items()]
    outs = [tmp_path / "0.pt", tmp_path / "1.pt"]
    processes = []
    for rank, out in enumerate(outs):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test", MEETING: str(tmp_path / "ranks")}
        command = [sys.executable, "-m", "tests.executor.rank_worker", str(out), *map(str, folders)]
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    texts = [process.communicate(timeout=240)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    ranks = [torch.load(out) for out in outs]
    for folder in folders:
        whole = load(
            folder,
            device=torch.device("cpu"),
            dtype="float32",
            backend=create("reference"),
            block_size=5,
            max_model_len=None,
            forward="general",
        )
        assert whole.model is not None
        expected = probe.expect(whole.model, probe.observe(whole.model, whole.context.tokens)).expected
        for heads, logits, weights_bytes in (rank[folder.name] for rank in ranks):
            assert heads == [FAMILIES[folder.name][1]], folder.name
            assert weights_bytes < 0.9 * whole.weights_bytes, folder.name
            assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4), folder.name
        assert torch.equal(ranks[0][folder.name][1], ranks[1][folder.name][1])


@pytest.mark.parametrize(
    ("family", "options", "world", "reason"),
    [
        ("Llama", HEADS, 3, "--tensor-parallel 3: this llama model has 4 KV heads, which can't be dealt out evenly"),
        ("Llama", {**HEADS, "num_key_value_heads": 2}, 4, "--tensor-parallel 4: this llama model has 2 KV heads"),
        ("StableLm", HEADS, 2, "stablelm models can't be split: transformers has no tensor-parallel plan for them"),
    ],
)
def test_what_cannot_be_split_is_refused(family: str, options: Mapping[str, object], world: int, reason: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    with pytest.raises(StartError, match=reason):
        families.check_parallel(config, world)


class FakeRanks(Ranks):
    """Records what rank 0 says, and answers for rank 1."""

    def __init__(self, answer: Inspection) -> None:
        super().__init__(0, 2)
        self.said: list[RankCommand] = []
        self.answer = answer

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        assert data is not None
        self.said.append(RankCommand.FromString(data))
        return data

    def collect(self, data: bytes) -> list[bytes]:
        return [data, self.answer.SerializeToString()]


class FakeRunner:
    """A runner that has drawn two tokens."""

    def __init__(self) -> None:
        self.drawn = [5, -1]

    def take_drawn(self) -> list[int]:
        drawn, self.drawn = self.drawn, []
        return drawn

    def run(self, plan: StepPlan) -> None:
        self.drawn = [7]

    def inspect(self, number: int) -> Inspection:
        return Inspection(id=number, checks=2, slots=[SlotState(slot=1, length=3, table=[4])])


def test_what_was_drawn_goes_with_the_next_command_once() -> None:
    ranks = FakeRanks(Inspection())
    lead = Lead(FakeRunner(), ranks)  # type: ignore[arg-type]
    lead.run(StepPlan(step=3))
    lead.end()
    lead.end()
    assert [list(command.drawn) for command in ranks.said] == [[5, -1], [7], []]
    assert [command.WhichOneof("command") for command in ranks.said] == ["plan", "end", "end"]


def test_an_inspection_tells_another_ranks_faults_and_other_slots() -> None:
    answer = Inspection(id=1, checks=2, faults=["its file is gone"], slots=[SlotState(slot=1, length=3, table=[9])])
    told = Lead(FakeRunner(), FakeRanks(answer)).inspect(1)  # type: ignore[arg-type]
    assert list(told.faults) == ["rank 1: its file is gone", "rank 1: its slots are not those of rank 0"]
    assert told.checks == 5


def test_a_follower_ends_when_it_is_told() -> None:
    class Said(FakeRanks):
        def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
            return commands.pop(0).SerializeToString()

    class Follower(FakeRunner):
        def draw_as(self, drawn: list[int]) -> None:
            done.append(list(drawn))

        def follow(self, plan: StepPlan) -> None:
            done.append(plan.step)

        def reset(self) -> None:
            done.append("reset")

    done: list[object] = []
    commands = [
        RankCommand(),
        RankCommand(plan=StepPlan(step=1)),
        RankCommand(drawn=[8], reset=True),
        RankCommand(end=True),
        RankCommand(plan=StepPlan(step=2)),
    ]
    follow(Follower(), Said(Inspection()))  # type: ignore[arg-type]
    assert done == [[], [], 1, [8], "reset", []]
