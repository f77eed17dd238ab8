"""The native backend against the reference, on whatever steps come to mind, for as long as asked; with sanitizers if asked.

    python -m tests.kernels.fuzz [--seconds 600] [--seed N] [--trials N] [--sanitize] [--prove]

A trial is a step of random shapes, strides, tables and lengths, copies of random frames, and a program of a decoder of these
shapes, beside the same operations one by one; its number is its seed. Trials run in a child process, so that one which kills it
has a number, too: `--seed N --trials 1` does that one again.

With --sanitize the library is compiled with AddressSanitizer and UBSan, tables have no entry to spare, and the frames that no
table names are forbidden: an access out of bounds ends the run with a report. --prove makes such faults first, one of each kind
and each in a process of its own, and ends where one is not found.
"""

import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionBackend, CacheShape, KvCache, LayerShape
from kernels.reference import ReferenceBackend
from tests.kernels import sanitized
from tests.kernels.attention_oracle import LIMITS, error
from tests.kernels.cases import Case, Sequence, computed, float64, outputs, poisoned, step_of, tables_of, threads
from tests.kernels.fuzz_programs import program_once

#: Elements of K and V in a step, and products of queries with keys: so many that a trial takes some tens of milliseconds.
_MOST_CACHED: Final = 300_000
_MOST_PRODUCTS: Final = 30_000_000

#: Between two lines that say how far it is.
_PAUSE_S: Final = 10.0

#: A trial that takes longer hangs, and ends the child.
_PATIENCE_S: Final = 120.0

#: In how many trials a fault that was made has to be found: not every step comes near an end.
_PROVING_TRIALS: Final = 40

_SIZES: Final = (32, 64, 80, 96, 112, 128, 256)


# ------------------------------------------------------------------------------------------------------------ one trial


def case_of(seed: int) -> Case:
    """Return the step of that number."""
    dice = random.Random(seed)
    while True:
        case = _draw(dice, seed)
        contexts = sum(sequence.context for sequence in case.sequences)
        products = sum(sequence.context * sequence.rows for sequence in case.sequences)
        tokens = max(layer.token_elements for layer in case.layers)
        heads = max(layer.kv_heads * (layer.key_size + layer.value_size) for layer in case.layers) * case.group
        # A row of few elements may be near zero altogether, and then no error is small beside it.
        least = min(layer.kv_heads * layer.value_size for layer in case.layers) * case.group
        if contexts * tokens <= _MOST_CACHED and products * heads <= _MOST_PRODUCTS and least >= 32:
            return case


def _draw(dice: random.Random, seed: int) -> Case:
    def size() -> int:
        return dice.choice(_SIZES) if dice.random() < 0.6 else dice.randint(1, 140)

    def near(block_size: int) -> int:
        return max(0, dice.randint(0, 3) * block_size + dice.randint(-1, 1)) if dice.random() < 0.6 else dice.randint(0, 400)

    def layer() -> LayerShape:
        key_size = size()
        return LayerShape(dice.choice((1, 1, 2, 3, 4, 8)), key_size, key_size if dice.random() < 0.7 else size())

    block_size = dice.choice((1, 2, 4, 8, 16, 16, 32, 64, 128, 256)) if dice.random() < 0.6 else dice.randint(1, 256)
    return Case(
        sequences=tuple(
            Sequence(near(block_size), 1 if dice.random() < 0.5 else dice.randint(1, 70)) for _ in range(dice.randint(1, 8))
        ),
        layers=tuple(layer() for _ in range(dice.randint(1, 3))),
        group=dice.randint(1, 16),
        block_size=block_size,
        dtype=dice.choice(list(LIMITS)),
        window=dice.choice((None, None, 1, dice.randint(1, 100), block_size)),
        softcap=dice.choice((None, None, dice.uniform(1, 50))),
        sinks=dice.random() < 0.3,
        scale=dice.choice((None, dice.uniform(0.01, 0.3))),
        scatter=dice.choice(("ordered", "shuffled", "sparse")),
        strides=dice.choice(("contiguous", "joined", "transposed", "spread")),
        threads=dice.choice((1, 1, 2, 3)),
        seed=seed,
    )


def attend_once(backend: AttentionBackend[Any], case: Case, *, forbid: bool) -> None:
    """Compare with the reference, both within the limit of what is true."""
    step = step_of(case)
    expected = outputs(ReferenceBackend(), step, case.scatter)
    tables = tables_of([-(-sequence.context // case.block_size) for sequence in step.sequences], case.scatter, case.seed)
    pool = poisoned(backend, CacheShape(case.layers, case.block_size, case.dtype), tables)
    with sanitized.forbidden(pool, tables) if forbid else nullcontext():
        found = computed(backend, step, pool, tables, spare=0 if forbid else 1)
    for own, other in zip(found, expected, strict=True):
        assert error(own, float64(other)) <= 2 * LIMITS[case.dtype], f"the backend differs from the reference in {case}"


def copy_once(backend: AttentionBackend[Any], case: Case) -> None:
    """Copy frames of this case's size inside a pool, and between two."""
    dice = random.Random(case.seed)
    shape = CacheShape(case.layers, case.block_size, case.dtype)
    elements = backend.layout(shape).elements
    pool, host = (torch.randn(dice.randint(2, 9), elements).to(case.dtype) for _ in range(2))
    blocks = dice.sample(range(len(pool)), len(pool))
    cut = dice.randint(1, len(pool) - 1)
    copies = [(dice.choice(blocks[:cut]), target) for target in blocks[cut:]]
    places = dice.sample(range(len(host)), dice.randint(0, len(host)))
    moves = [(dice.randrange(len(pool)), place) for place in places]
    copied, moved = pool.clone(), host.clone()
    for source, target in copies:
        copied[target] = pool[source]
    for source, target in moves:
        moved[target] = copied[source]
    with threads(case.threads):
        backend.copy_blocks(KvCache(shape, pool), copies)
        backend.swap_blocks(pool, host, moves)
    assert torch.equal(pool, copied), f"copies {copies} in {shape}"
    assert torch.equal(host, moved), f"moves {moves} in {shape}"


def try_once(seed: int, *, forbid: bool) -> None:
    """Do one trial, with a backend of its own: so its workspace is as large as it has to be."""
    case = case_of(seed)
    known = library.instructions()
    attend_once(CpuBackend(known[seed % len(known)]), case, forbid=forbid)
    copy_once(CpuBackend(), case)
    program_once(CpuBackend(known[seed // 2 % len(known)]), case, forbid=forbid)


# --------------------------------------------------------------------------------------------------------- many of them


def work(asked: Namespace) -> None:
    """Be the child: do trials, and say which before each."""
    torch.set_num_threads(1)
    if asked.library is not None:
        sanitized.use(asked.library)
    if asked.prove:
        prove(asked.seed, _PROVING_TRIALS)
    end = time.monotonic() + asked.seconds
    for seed in range(asked.seed, asked.seed + asked.trials):
        if time.monotonic() > end:
            break
        print(seed, flush=True)
        faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
        try_once(seed, forbid=asked.library is not None)


def _try_planted(name: str, seeds: range) -> NoReturn:
    """Do trials with that fault, and end the process. That results are wrong is no matter."""
    try:
        for seed in seeds:
            with suppress(AssertionError):
                once = program_once if sanitized.PLANTS[name].function == "run" else attend_once
                once(sanitized.planted(name), case_of(seed), forbid=True)
    finally:
        os._exit(0)


def prove(first: int, trials: int) -> None:
    """Make a fault of each kind, in a process that ends with it, and say what the sanitizer said.

    Raises:
        SystemExit: it did not end with a report.
    """
    for name in sanitized.PLANTS:
        with tempfile.TemporaryFile("w+") as report:
            process = os.fork()
            if process == 0:
                os.dup2(report.fileno(), sys.stderr.fileno())
                _try_planted(name, range(first, first + trials))
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            report.seek(0)
            said = [line for line in report if line.startswith("SUMMARY") or "runtime error" in line]
        if status != sanitized.EXIT_CODE or not said:
            raise SystemExit(f"{name}: not found in {trials} trials (status {status})")
        print(f"{name}: {said[0].strip()}", flush=True)


def supervise(asked: Namespace, folder: Path) -> int:
    """Start the child, say how far it is, and which trial it was that ended it; return the exit status."""
    command = [sys.executable, "-m", "tests.kernels.fuzz", "--child", f"--seconds={asked.seconds}", f"--trials={asked.trials}"]
    command += [f"--seed={asked.seed}"]
    environment = dict(os.environ)
    if asked.sanitize or asked.prove:
        if asked.build is None:
            print("compiling with sanitizers", flush=True)
            sanitized.compile_into(folder, sanitized.ALL)
        command.append(f"--library={folder}")
        environment |= sanitized.environment()
    if asked.prove:
        command.append("--prove")
    began = said = time.monotonic()
    done, seed = 0, asked.seed
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.strip().isdecimal():
                print(line, end="", flush=True)
                continue
            done, seed = done + 1, int(line)
            if time.monotonic() - said > _PAUSE_S:
                said = time.monotonic()
                print(f"{done:,} trials, {said - began:.0f} of {asked.seconds:.0f} s, at seed {seed}", flush=True)
    if child.returncode == 0:
        print(f"{done:,} trials from seed {asked.seed} on, {time.monotonic() - began:.0f} s: nothing found", flush=True)
        return 0
    again = f"python -m tests.kernels.fuzz --seed {seed} --trials 1{' --sanitize' if asked.sanitize else ''}"
    print(f"a trial ended it (status {child.returncode}); again: {again}", flush=True)
    return 1


def main() -> int:
    """See the module."""
    parser = ArgumentParser(prog="python -m tests.kernels.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, help="of the first trial; else a random one")
    parser.add_argument("--trials", type=int, default=10**9, help="at most so many")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    parser.add_argument("--prove", action="store_true", help="first make faults, each of which has to be found")
    parser.add_argument("--build", type=Path, help="where the library lies, compiled with sanitizers already")
    parser.add_argument("--child", action="store_true", help="(what it starts itself)")
    parser.add_argument("--library", type=Path, help="(likewise)")
    asked = parser.parse_args()
    if asked.seed is None:
        asked.seed = random.SystemRandom().randrange(10**9)
    if asked.child:
        work(asked)
        return 0
    with tempfile.TemporaryDirectory(prefix="kilburn-fuzz-") as name:
        return supervise(asked, asked.build or Path(name))


if __name__ == "__main__":
    sys.exit(main())
