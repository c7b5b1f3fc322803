"""Pictures made of rows: a label, a strip that is as wide as the window lets it be, and a figure.

Lengths along a strip are shares of its width, so that texts keep their size on any screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from autobalance.report.markup import Markup, element, joined, percent

_TICKS = 5
# Words at less than this share from an end would be cut off there.
_EDGE = 0.04


def row(label: str, strip: str, figure: str, *, over: bool = False) -> Markup:
    """One row of a picture.

    Example:
        >>> row("0 A100", strip([], 24, "memory"), "12.5 of 16 GiB")

    Args:
        label: what it is about.
        strip: its picture.
        figure: what the picture shows, as a number.
        over: True where the number should alarm.
    """
    return element(
        "div",
        element("div", label, class_="label"),
        element("div", strip, class_="strip"),
        element("div", figure, class_="figure over" if over else "figure"),
        class_="row",
    )


def strip(shapes: Iterable[str], height: int, about: str, class_: str | None = None) -> Markup:
    """The picture of a row.

    Example:
        >>> strip([bar(0, 0.5, 24, "weights", "3 GiB")], 24, "memory of device 0")

    Args:
        shapes: SVG elements.
        height: pixels.
        about: in words, for those who cannot see it.
        class_: of the element.
    """
    return element("svg", *shapes, width="100%", height=height, role="img", aria_label=about, class_=class_)


def bar(start: float, stop: float, height: float, class_: str, title: str, top: float = 0) -> Markup:
    """A bar along a strip, which tells its title when pointed at.

    Example:
        >>> bar(0.0, 0.5, 24, "weights", "weights: 3.00 GiB")

    Args:
        start, stop: shares of the strip's width.
        height: pixels.
        class_: of the element, which gives it its colour.
        title: what it is.
        top: pixels above it.
    """
    return element(
        "rect",
        element("title", title),
        x=percent(start),
        y=top,
        width=percent(max(0.0, stop - start)),
        height=height,
        class_=class_,
    )


def stretched(shape: str, box: str, height: float, **attributes: object) -> Markup:
    """A shape that a strip stretches to its width, with a picture's own coordinates.

    Example:
        >>> stretched(element("path", d="M0 0H1000V1z"), "0 0 1000 1", 24)

    Args:
        shape: SVG elements, without texts, which would be stretched too.
        box: left, top, width and height of the coordinates.
        height: pixels.
        attributes: of the element around it.
    """
    return element("svg", shape, viewBox=box, preserveAspectRatio="none", width="100%", height=height, **attributes)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """What colours stand for.

    Example:
        >>> legend([("weights", "weights"), ("budget", "budget")])

    Args:
        entries: class of the colour, and what it stands for.
    """
    items = (
        element("li", element("span", class_=f"swatch {class_}", aria_hidden="true"), words)
        for class_, words in entries
    )
    return element("ul", *items, class_="legend")


def axis(largest: float, words: Callable[[float], str], unit: str) -> Markup:
    """The row below strips that says what their lengths mean.

    Example:
        >>> axis(80.0, lambda number: f"{number:g}", "GiB")

    Args:
        largest: what the whole width stands for.
        words: a tick's number as text.
        unit: of the numbers.
    """
    shapes = []
    for tick in ticks(largest):
        share = tick / largest
        anchor = "start" if share < _EDGE else "end" if share > 1 - _EDGE else "middle"
        shapes.append(element("line", x1=percent(share), x2=percent(share), y1=0, y2=5, class_="tick"))
        shapes.append(element("text", words(tick), x=percent(share), y=18, text_anchor=anchor, class_="small"))
    return row("", strip(shapes, 22, f"axis in {unit}"), unit)


def ticks(largest: float) -> Sequence[float]:
    """Round numbers from 0 to at most `largest`, few enough for a narrow screen.

    Example:
        >>> ticks(77.6)
        [0.0, 20.0, 40.0, 60.0]

    Args:
        largest: above 0.
    """
    rough = largest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * number for number in range(int(largest / step * (1 + 1e-9)) + 1)]


def picture(*rows: str, class_: str = "") -> Markup:
    """Rows as one picture.

    Example:
        >>> picture(row("a", strip([], 24, "nothing"), "0"))

    Args:
        rows: as `row` makes them.
        class_: for the style sheet.
    """
    return element("div", joined(*rows), class_=f"picture {class_}".strip())
