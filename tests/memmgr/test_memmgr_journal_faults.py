"""Journals that are cut off, damaged, hostile or of a core with a bug; files that are none; a disk that is full."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import Any
from zlib import crc32

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kilburn.errors import StartError
from kilburn.v1.journal_pb2 import JournalEntry
from memmgr.core.blocks import BlockPool
from memmgr.core.lineage import HASH_BYTES, Lineage
from memmgr.core.swap import SwappingMemory
from memmgr.core.table import MemoryCounters
from memmgr.journal import files
from memmgr.journal.files import FIRST_LINE, MAX_FRAME_BYTES, Frames, JournalError, JournalFile
from memmgr.journal.journaled import memory_of
from memmgr.journal.recording import Journal
from memmgr.journal.replaying import Replay, ReplayError, replay
from tests.memmgr.memmgr_journal import framed, grow, open_journal, parsed, replayed, write_small

EXAMPLES = int(os.environ.get("KILBURN_EXAMPLES", "300"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def small(path: Path) -> bytes:
    return write_small(path)


def test_cut_off_at_every_byte_it_is_replayed_up_to_there_and_goes_on_from_there(path: Path, small: bytes) -> None:
    whole = replayed(path)[1].operations
    seen = set()
    for length in range(1, len(small)):  # an empty file is none
        path.write_bytes(small[:length])
        _, summary = replayed(path)
        assert summary.bytes + summary.torn_bytes == length or not summary.operations
        assert summary.operations <= whole
        seen.add(summary.operations)
        journal = open_journal(path)
        memory = memory_of(journal, 4, 2, prefix_cache=True, counters=MemoryCounters())
        memory.end_step()
        journal.close(ended=True)
        _, after = replayed(path)
        assert (after.operations, after.runs, after.ended) == (summary.operations + 1, summary.runs + 1, True)
        assert after.killed == (1 if summary.runs and not summary.ended else 0)
        assert after.torn_bytes == 0
    assert len(seen) >= 4, "operations came in several frames"


def test_every_flipped_bit_is_found(path: Path, small: bytes) -> None:
    for position in range(len(small)):
        damaged = bytearray(small)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"damaged|no journal|another version"):
            replayed(path)


def test_frames_that_are_removed_doubled_or_swapped_are_found(path: Path, small: bytes) -> None:
    with path.open("rb") as file:
        frames = [small[frame.start : frame.end] for frame in Frames(file).read()]
    assert len(frames) >= 4
    for wrong in [frames[:1] + frames[2:], [*frames, frames[-1]], [frames[0], frames[2], frames[1], *frames[3:]]]:
        path.write_bytes(FIRST_LINE + b"".join(wrong))
        with pytest.raises(JournalError, match="damaged at byte"):
            replayed(path)


def test_what_came_of_an_operation_is_compared_at_each(path: Path, small: bytes) -> None:
    """Each number in the journal that tells what came of something, changed by one, is found at its own operation."""
    good, found = parsed(path), set()
    number = 0
    for place, entry in enumerate(good):
        kind = entry.WhichOneof("kind")
        number += len(entry.grow.sequences) + len(entry.acknowledge.sequences) or kind not in {"run", "pool", "clock", "end"}
        told = entry.grow.blocks or entry.acknowledge.nodes
        if not told and not entry.HasField("outcome"):
            continue
        wrong = JournalEntry.FromString(entry.SerializeToString())
        if told:
            (wrong.grow.blocks if kind == "grow" else wrong.acknowledge.nodes)[len(told) - 1] += 1
        else:
            wrong.outcome ^= 1
        framed([*good[:place], wrong, *good[place + 1 :]], path)
        with pytest.raises(ReplayError, match=rf"^operation {number} \({kind}, .* when it was recorded"):
            replayed(path)
        found.add(kind)
    assert found == {entry.WhichOneof("kind") for entry in good} - {"run", "pool", "clock", "end"}


@pytest.mark.parametrize("check_every", [1, 7])
def test_a_core_that_forgets_a_reference_is_found_at_the_operation(
    path: Path, small: bytes, monkeypatch: pytest.MonkeyPatch, check_every: int
) -> None:
    """The bug is in the replaying core here; a recording one is below."""
    kinds = [kind for entry in parsed(path) for kind in [entry.WhichOneof("kind")] * max(1, len(entry.grow.sequences))]
    operations = [kind for kind in kinds if kind not in {"run", "pool", "clock", "end"}]
    drop_all = BlockPool.drop_all

    def forgets(pool: BlockPool, blocks: list[int], of_use: list[bytes | None], now: float) -> list[int]:
        return drop_all(pool, blocks[1:], of_use, now)

    monkeypatch.setattr(BlockPool, "drop_all", forgets)
    first = 1 + next(number for number, kind in enumerate(operations) if kind in {"swap_out", "release"})
    expected = -(-first // check_every) * check_every
    with pytest.raises(ReplayError) as caught:
        replayed(path, check_every)
    number = int(str(caught.value).split()[1])
    assert first <= number <= expected
    if check_every == 1:
        assert "(swap_out, " in str(caught.value)
        assert re.search(r"an invariant does not hold: block \d+ counts 1 references, 0 sequences hold it$", str(caught.value))


def test_a_bug_in_the_recording_core_is_found_by_a_sound_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(path)
    memory = memory_of(journal, 8, 2, prefix_cache=False, counters=MemoryCounters())
    for key in "abc":
        admission = memory.plan_admission(Lineage(bytes(HASH_BYTES), "tenant"), array("I", [1]), 0)
        assert admission is not None
        memory.admit(key, Lineage(bytes(HASH_BYTES), "tenant"), admission)
        grow(memory, key, 3)
    memory.end_step()
    with monkeypatch.context() as bug:
        bug.setattr(BlockPool, "drop_all", lambda *_: [])
        memory.release("b", array("I", [1, 2, 3]))
    grow(memory, "a", 2)
    journal.close(ended=True)
    with pytest.raises(
        ReplayError, match=r"^operation 9 \(grow, after 1 steps\): came to blocks \[2\], \[6\] when it was recorded$"
    ):
        replayed(path)


def test_an_operation_that_did_not_come_back_is_the_last_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the journal before the core fails at it, so that the replay fails there too, or tells that it does not."""
    journal = open_journal(path)
    memory = memory_of(journal, 4, 2, prefix_cache=False, counters=MemoryCounters())
    lineage, take = Lineage(bytes(HASH_BYTES), ""), BlockPool.take
    admission = memory.plan_admission(lineage, array("I", [1]), 0)
    assert admission is not None
    memory.admit("a", lineage, admission)
    grow(memory, "a", 2)
    with monkeypatch.context() as bug:
        bug.setattr(BlockPool, "take", lambda pool: never() if pool.live else take(pool))
        with pytest.raises(AssertionError):
            grow(memory, "a", 2)
        journal.flush()
        with pytest.raises(ReplayError, match=r"operation 3 \(grow, after 0 steps\): an invariant does not hold: never"):
            replayed(path)
    journal.close(ended=False)
    with pytest.raises(
        ReplayError, match=r"operation 3 .*: came to blocks \[1\]; when it was recorded, the process did not come back from it"
    ):
        replayed(path)


def never() -> Any:
    raise AssertionError("never")


# ------------------------------------------------------------------------------------------------- hostile journals

ENTRY = JournalEntry
POOL = ENTRY(pool=ENTRY.Pool(total_blocks=4, block_size=2, prefix_cache=True))
ROOT = bytes(HASH_BYTES)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([ENTRY(flush=ENTRY.Flush())], "before the first operation: no pool has begun"),
        ([POOL, ENTRY()], "before the first operation: an entry that says nothing"),
        ([ENTRY(pool=ENTRY.Pool(total_blocks=2**32 - 1, block_size=2))], "a pool of 4294967295 blocks"),
        ([ENTRY(pool=ENTRY.Pool(total_blocks=0, block_size=2))], "a pool of 0 blocks"),
        ([ENTRY(pool=ENTRY.Pool(total_blocks=4, block_size=2**31))], "blocks of 2147483648 tokens"),
        ([POOL, ENTRY(admit=ENTRY.Admit(root=b"short"))], "operation 1 (admit, after 0 steps): no root"),
        ([POOL, ENTRY(admit=ENTRY.Admit(root=ROOT, blocks=[2**32 - 1]))], "block 4294967295 was found in the cache"),
        ([POOL, ENTRY(admit=ENTRY.Admit(root=ROOT, tail=1, tail_tokens=1))], "block 1 was found in the cache"),
        ([POOL, ENTRY(admit=ENTRY.Admit(root=ROOT, tail=1, tail_tokens=3))], "3 tokens of a block of 2"),
        (
            [POOL, *[ENTRY(admit=ENTRY.Admit(root=ROOT))] * 2],
            "operation 2 (admit, after 0 steps): sequence 0 has a table already",
        ),
        ([POOL, ENTRY(fork=ENTRY.Fork(parent=7))], "sequence 7 has no table"),
        ([POOL, ENTRY(grow=ENTRY.Grow(sequences=[1], counts=[]))], "does not add up"),
        ([POOL, ENTRY(admit=ENTRY.Admit(root=ROOT)), ENTRY(grow=ENTRY.Grow(sequences=[0], counts=[2**32 - 1]))], "can't grow by"),
        (
            [POOL, ENTRY(admit=ENTRY.Admit(root=ROOT)), ENTRY(acknowledge=ENTRY.Acknowledge(sequences=[0], counts=[1]))],
            "0 were planned",
        ),
        ([POOL, ENTRY(flush_part=ENTRY.FlushPart(start=0, stop=2**32 - 1))], "blocks 0 to 4294967295 of 4"),
        ([POOL, ENTRY(pin=ENTRY.Pin(blocks=[0]))], "block 0 was pinned, and is not in the cache"),
        ([POOL, ENTRY(pin=ENTRY.Pin(expires_at=float("nan")))], "its end is no time"),
        ([POOL, ENTRY(swap_out=ENTRY.SwapOut(sequences=[0], lengths=[1]))], "sequence 0 has no table"),
        ([POOL, ENTRY(admit=ENTRY.Admit(root=ROOT)), ENTRY(swap_out=ENTRY.SwapOut(sequences=[0], lengths=[1]))], "1 tokens of 0"),
        ([POOL, ENTRY(swap_out=ENTRY.SwapOut())], "0 blocks are free there"),
        ([POOL, ENTRY(swap_out=ENTRY.SwapOut(sequences=[0]))], "it can't be done: ValueError"),
        ([POOL, ENTRY(swap_in=ENTRY.SwapIn(sequences=[0], counts=[1]))], "sequence 0 is not on the host"),
        ([POOL, ENTRY(drop_swapped=ENTRY.DropSwapped(sequence=5))], "sequence 5 is not on the host"),
        ([ENTRY(pool=ENTRY.Pool(total_blocks=4, block_size=2, host_blocks=2**31))], "2147483648 blocks on the host"),
        ([POOL, ENTRY(flush=ENTRY.Flush(), outcome=3)], "came to 0, 3 when it was recorded"),
    ],
)
def test_what_can_not_have_been_is_one_plain_line(path: Path, entries: list[JournalEntry], complaint: str) -> None:
    framed(entries, path)
    with pytest.raises(ReplayError) as caught:
        replayed(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


numbers = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5, 2**31, 2**32 - 1])
lists = st.lists(numbers, max_size=3)
any_entry = st.one_of(
    st.builds(lambda a, b: ENTRY(admit=ENTRY.Admit(root=ROOT, sequence=a, blocks=b)), numbers, lists),
    st.builds(lambda a, b: ENTRY(fork=ENTRY.Fork(parent=a, sequence=b)), numbers, numbers),
    st.builds(lambda a, b: ENTRY(grow=ENTRY.Grow(sequences=[a], counts=[b])), numbers, numbers),
    st.builds(lambda a, b, c: ENTRY(acknowledge=ENTRY.Acknowledge(sequences=[a], counts=[b], tokens=c)), numbers, numbers, lists),
    st.builds(lambda a, b: ENTRY(release=ENTRY.Release(sequence=a, tokens=b)), numbers, lists),
    st.builds(lambda a, b: ENTRY(pin=ENTRY.Pin(blocks=a, expires_at=b)), lists, st.floats()),
    st.builds(lambda a, b: ENTRY(swap_out=ENTRY.SwapOut(sequences=a, lengths=b)), lists, lists),
    st.builds(lambda a, b, c: ENTRY(swap_in=ENTRY.SwapIn(sequences=a, counts=b, blocks=c)), lists, lists, lists),
    st.builds(lambda a: ENTRY(drop_swapped=ENTRY.DropSwapped(sequence=a)), numbers),
    st.builds(lambda a: ENTRY(unpin=ENTRY.Unpin(number=a)), numbers),
    st.builds(lambda a: ENTRY(distrust=ENTRY.Distrust(sequence=a)), numbers),
    st.builds(lambda a: ENTRY(distrust_cached=ENTRY.DistrustCached(root=ROOT, tokens=a)), lists),
    st.builds(lambda a: ENTRY(clock=a), st.floats()),
    st.builds(lambda a: ENTRY(expire=ENTRY.Expire(now=a)), st.floats()),
    st.sampled_from([ENTRY(end_step=ENTRY.EndStep()), ENTRY(flush=ENTRY.Flush()), ENTRY(clear_pins=ENTRY.ClearPins()), POOL]),
)


@given(entries=st.lists(any_entry, max_size=12))
@settings(max_examples=EXAMPLES, deadline=None)
def test_no_journal_brings_a_replay_to_its_knees(entries: list[JournalEntry]) -> None:
    replaying = Replay()
    with suppress(ReplayError):
        for entry in [POOL, *entries]:
            replaying.apply(entry)


@given(data=st.binary(max_size=200))
@settings(deadline=None)
def test_bytes_of_any_kind_are_no_journal(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        for content in (data, FIRST_LINE + data):
            path.write_bytes(content)
            if FIRST_LINE.startswith(content):
                continue
            with suppress(JournalError):
                assert replay(path, Replay()).torn_bytes, "so short that it may be a frame that was cut off"


def test_a_payload_of_no_entries_is_damage(path: Path) -> None:
    file = JournalFile(path)
    file.append(b"\x05abc")
    file.close()
    with pytest.raises(JournalError, match=r"no entry: .*, behind operation 0"):
        replayed(path)


def test_a_length_that_no_frame_has_is_damage_though_its_checksum_is_right(path: Path) -> None:
    header = pack("<4sIII", b"\xabKJ\n", MAX_FRAME_BYTES + 1, crc32(FIRST_LINE), 0)
    path.write_bytes(FIRST_LINE + header + crc32(header).to_bytes(4, "little"))
    with pytest.raises(JournalError, match="damaged at byte 18"):
        replayed(path)


# -------------------------------------------------------------------------------------------------------- the file


def test_a_new_journal_is_for_its_owner_alone(path: Path) -> None:
    umask = os.umask(0)
    try:
        open_journal(path).close(ended=True)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"my only copy of the thesis", "no journal; it is left as it is, name another file"),
        (b"kilburn journal 2\n", "a journal of another version; it is left as it is"),
        (FIRST_LINE + bytes(100), "damaged at byte 18; it is left as it is"),
    ],
)
def test_what_is_no_sound_journal_is_not_touched(path: Path, content: bytes, complaint: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StartError, match=complaint):
        JournalFile(path)
    assert path.read_bytes() == content


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, complaint in {
        tmp_path / "pipe": "this is no plain file",
        Path("/dev/null"): "this is no plain file",
        tmp_path: "Is a directory",
        tmp_path / "no" / "journal": "No such file or directory",
    }.items():
        with pytest.raises(StartError, match=f"^--journal {path}: {complaint}"):
            JournalFile(path)


def test_a_journal_has_one_writer(path: Path) -> None:
    first = open_journal(path)
    with pytest.raises(StartError, match="another process is writing this journal"):
        JournalFile(path)
    first.close(ended=True)
    JournalFile(path).close()


def test_of_a_long_journal_only_the_end_is_looked_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is cut off, and whatever looks like a header there, it goes on behind its last whole frame."""
    file = JournalFile(path)
    sizes = [file.size]
    for length in (40, 7, 60, 60, 50, 1, 33, 60):
        file.append((b"\xabKJ\n" * 20)[:length])
        sizes.append(file.size)
    file.close()
    whole = path.read_bytes()
    monkeypatch.setattr(files, "MAX_FRAME_BYTES", 60)
    monkeypatch.setattr(files, "_END_BYTES", 2 * (20 + 60))
    for length in range(len(FIRST_LINE), len(whole) + 1):
        path.write_bytes(whole[:length])
        file = JournalFile(path)
        expected = max(end for end in sizes if end <= length)
        assert (file.size, file.cut_bytes) == (expected, length - expected)
        file.append(b"more")
        file.close()
        with path.open("rb") as again:
            assert [frame.payload for frame in Frames(again).read()][-1] == b"more"
    path.write_bytes(whole[: len(whole) - 100] + bytes(400))
    with pytest.raises(StartError, match=r"damaged behind byte \d+; it is left"):
        JournalFile(path)


class Log:
    """What the journal logs."""

    def __init__(self) -> None:
        self.errors: list[dict[str, object]] = []

    def error(self, event: str, **fields: object) -> None:
        self.errors.append({"event": event, **fields})


@pytest.fixture
def no_room() -> Iterator[Callable[[int], None]]:
    """Return what lets no file of this process grow beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_journal_and_nothing_else(path: Path, no_room: Callable[[int], None]) -> None:
    log = Log()
    journal = Journal(JournalFile(path), log, 0.0)  # type: ignore[arg-type]
    memory = memory_of(journal, 64, 2, prefix_cache=False, counters=MemoryCounters())
    lineage = Lineage(bytes(HASH_BYTES), "")
    admission = memory.plan_admission(lineage, array("I", [1]), 0)
    assert admission is not None
    memory.admit("a", lineage, admission)
    journal.flush()
    whole = journal.written_bytes
    no_room(whole + 20)
    for _ in range(30):
        grow(memory, "a", 4)
        memory.end_step()
        journal.flush()
    no_room(resource.RLIM_INFINITY)
    assert memory.tables["a"].planned == 120
    assert log.errors == [
        {
            "event": "the journal ends here: it can't be written; serving goes on without it",
            "journal": str(path),
            "reason": "File too large",
            "whole_bytes": whole,
        }
    ]
    assert path.stat().st_size == whole
    assert type(memory_of(journal, 4, 2, prefix_cache=False, counters=MemoryCounters())) is SwappingMemory
    journal.close(ended=True)
    _, summary = replayed(path)
    assert (summary.operations, summary.torn_bytes) == (1, 0)
