"""Charts: what slots were good for under each policy, as stacked bars like Figure 2 of Kwon et al. (2023), and ratios as curves.

SVG from the standard library's XML writer: text, the same for the same numbers. Knows numbers and names, not where they come
from.
"""

from __future__ import annotations

import math
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

#: Colours of curves, of different lightness, and how their lines are broken.
_STROKES: Final = (("#2f6f4f", ""), ("#c0573f", "7 4"), ("#7d6aa8", "2 3"), ("#e0b04c", "9 3 2 3"))

#: A curve's axis begins at 1 and has at most so many steps, of one of these sizes.
_MOST_TICKS: Final = 8
_TICK_SIZES: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what is written under it, in two lines, and a share for each of PARTS, which sum to 1."""

    name: str
    note: str
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve: its name, and a ratio of at least 1 for each point of the axis below."""

    name: str
    ratios: tuple[float, ...]


def stacked_bars(bars: Sequence[Bar], title: str, axis: str) -> str:
    """Return the chart as an SVG document."""
    svg = _empty(title, axis)
    for tick in _TICKS:
        _tick(svg, _y(tick / 100), str(tick))
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
    return _document(svg)


def ratio_curves(curves: Sequence[Curve], points: Sequence[str], title: str, axis: str, below: str) -> str:
    """Return curves of ratios over evenly spaced points as an SVG document. The axis begins at 1."""
    assert len(curves) <= len(_STROKES)
    svg = _empty(title, axis)
    highest = max((ratio for curve in curves for ratio in curve.ratios), default=1.0)
    step = next((size for size in _TICK_SIZES if 1 + size * _MOST_TICKS >= highest), highest)
    top = max(1, math.ceil((highest - 1) / step - 1e-9)) * step
    for number in range(round(top / step) + 1):
        _tick(svg, _y(number * step / top), _number(1 + number * step))
    field = (_RIGHT - _LEFT) / max(1, len(points))
    for number, point in enumerate(points):
        _text(svg, _LEFT + field * (number + 0.5), _BOTTOM + 24, point)
    _text(svg, (_LEFT + _RIGHT) / 2, _BOTTOM + 48, below)
    for number, (curve, (colour, dashes)) in enumerate(zip(curves, _STROKES, strict=False)):
        assert len(curve.ratios) == len(points)
        height = _TOP + 24 * number
        _line(svg, [(_RIGHT + 12, height + 7), (_RIGHT + 36, height + 7)], colour, dashes)
        _text(svg, _RIGHT + 42, height + 11.5, curve.name, anchor="start")
        places = [(_LEFT + field * (at + 0.5), _y((ratio - 1) / top)) for at, ratio in enumerate(curve.ratios)]
        _line(svg, places, colour, dashes)
        for x, y in places:
            ElementTree.SubElement(svg, "circle", {"cx": _number(x), "cy": _number(y), "r": "3", "fill": colour})
    return _document(svg)


def _empty(title: str, axis: str) -> ElementTree.Element:
    """Return a chart with a title and the name of its vertical axis."""
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
    middle = (_TOP + _BOTTOM) / 2
    _text(svg, 20, middle, axis).set("transform", f"rotate(-90 20 {_number(middle)})")
    return svg


def _document(svg: ElementTree.Element) -> str:
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _tick(svg: ElementTree.Element, height: float, words: str) -> None:
    """Draw a line across the field, with its number at the left."""
    ElementTree.SubElement(
        svg, "line", {"x1": str(_LEFT), "x2": str(_RIGHT), "y1": _number(height), "y2": _number(height), "stroke": "#cccccc"}
    )
    _text(svg, _LEFT - 8, height + 4, words, anchor="end")


def _line(svg: ElementTree.Element, places: Sequence[tuple[float, float]], colour: str, dashes: str) -> None:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in places)
    strokes = {"points": points, "fill": "none", "stroke": colour, "stroke-width": "2"}
    ElementTree.SubElement(svg, "polyline", strokes | ({"stroke-dasharray": dashes} if dashes else {}))


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
