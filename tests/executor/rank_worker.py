"""One rank of a test: says things to the other, loads its share of models, and writes what came of it to a file.

Started as `python -m tests.executor.rank_worker OUT FOLDER...`, with torchrun's variables in its environment.
"""

import sys
from pathlib import Path

import structlog
import torch

from executor import probe
from executor.loader import load
from executor.ranks import Ranks, meet
from kernels.registry import create

#: More than the first broadcast takes, and no multiple of anything.
LARGE = bytes(number * number % 251 for number in range(100_003))


def talk(ranks: Ranks) -> None:
    """Send each kind of message both ways."""
    assert ranks.broadcast(LARGE if ranks.rank == 0 else None) == LARGE
    assert ranks.broadcast(b"" if ranks.rank == 1 else None, 1) == b""
    for length in (1, 4095, 4096, 4097):
        assert ranks.collect(LARGE[: length + ranks.rank]) == [LARGE[:length], LARGE[: length + 1]]
    assert ranks.least(7 + ranks.rank) == 7


def main(out: Path, folders: list[Path]) -> None:
    """Write the KV heads of this rank and the logits of each model."""
    found = {}
    with meet(2, "cpu", structlog.get_logger()) as ranks:
        talk(ranks)
        for folder in folders:
            loaded = load(
                folder,
                device=torch.device("cpu"),
                dtype="float32",
                backend=create("reference"),
                block_size=5,
                max_model_len=None,
                world=2,
            )
            assert loaded.model is not None
            trial = probe.expect(loaded.model, probe.observe(loaded.model, loaded.context.tokens))
            heads = {layer.kv_heads for layer in loaded.shape.layers}
            found[folder.name] = (sorted(heads), trial.expected, loaded.weights_bytes)
    torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
