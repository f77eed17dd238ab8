"""What slots were good for under each policy, as a stacked bar chart like Figure 2 of Kwon et al. (2023).

SVG from the standard library's XML writer: text, the same for the same numbers. Knows shares and names, not where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

#: (name, colour, colour of the number in it), from the bottom of a bar. The colours differ in lightness as well.
PARTS: Final = (
    ("tokens", "#2f6f4f", "#ffffff"),
    ("reserved", "#e0b04c", "#000000"),
    ("internal fragmentation", "#c0573f", "#ffffff"),
    ("external fragmentation", "#7d6aa8", "#ffffff"),
    ("free", "#dddddd", "#000000"),
)

#: A number is written into its part from this share on: below, there is no room for it.
_LEAST_LABELLED: Final = 0.05

_WIDTH: Final = 760
_HEIGHT: Final = 460
_LEFT: Final = 64  # of the first bar's field
_RIGHT: Final = 560  # of the last bar's field; the legend is beside it
_TOP: Final = 56
_BOTTOM: Final = 388
_BAR: Final = 76
_TICKS: Final = range(0, 101, 20)  # %
_SVG: Final = "http://www.w3.org/2000/svg"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what is written under it, in two lines, and a share for each of PARTS, which sum to 1."""

    name: str
    note: str
    shares: tuple[float, ...]


def stacked_bars(bars: Sequence[Bar], title: str, axis: str) -> str:
    """Return the chart as an SVG document."""
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": _SVG,
            "viewBox": f"0 0 {_WIDTH} {_HEIGHT}",
            "width": str(_WIDTH),
            "height": str(_HEIGHT),
            "font-family": "Helvetica, Arial, sans-serif",
            "font-size": "13",
        },
    )
    ElementTree.SubElement(svg, "title").text = title
    _box(svg, 0, 0, _WIDTH, _HEIGHT, "#ffffff")
    _text(svg, _LEFT, 28, title, size=16, anchor="start")
    for tick in _TICKS:
        height = _y(tick / 100)
        ElementTree.SubElement(
            svg, "line", {"x1": str(_LEFT), "x2": str(_RIGHT), "y1": _number(height), "y2": _number(height), "stroke": "#cccccc"}
        )
        _text(svg, _LEFT - 8, height + 4, str(tick), anchor="end")
    middle = (_TOP + _BOTTOM) / 2
    _text(svg, 20, middle, axis).set("transform", f"rotate(-90 20 {_number(middle)})")
    field = (_RIGHT - _LEFT) / max(1, len(bars))
    for number, bar in enumerate(bars):
        assert len(bar.shares) == len(PARTS)
        centre = _LEFT + field * (number + 0.5)
        below = 0.0
        for (_, colour, ink), share in zip(PARTS, bar.shares, strict=True):
            top = _y(below + share)
            _box(svg, centre - _BAR / 2, top, _BAR, _y(below) - top, colour)
            if share >= _LEAST_LABELLED:
                _text(svg, centre, (top + _y(below)) / 2 + 4.5, f"{share:.1%}").set("fill", ink)
            below += share
        _text(svg, centre, _BOTTOM + 24, bar.name)
        _text(svg, centre, _BOTTOM + 44, bar.note, size=12).set("fill", "#555555")
    for number, (name, colour, _) in enumerate(reversed(PARTS)):
        height = _TOP + 24 * number
        _box(svg, _RIGHT + 20, height, 14, 14, colour)
        _text(svg, _RIGHT + 42, height + 11.5, name, anchor="start")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _y(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _box(parent: ElementTree.Element, x: float, y: float, width: float, height: float, colour: str) -> None:
    places = {"x": x, "y": y, "width": width, "height": height}
    ElementTree.SubElement(parent, "rect", {name: _number(value) for name, value in places.items()} | {"fill": colour})


def _text(
    parent: ElementTree.Element, x: float, y: float, words: str, *, size: int | None = None, anchor: str = "middle"
) -> ElementTree.Element:
    element = ElementTree.SubElement(parent, "text", {"x": _number(x), "y": _number(y), "text-anchor": anchor})
    if size is not None:
        element.set("font-size", str(size))
    element.text = words
    return element
