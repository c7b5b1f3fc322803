"""The memory of every device over one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import Whole
from autobalance.report.bars import exactly
from autobalance.report.markup import Markup, element, joined, percent
from autobalance.report.names import device_title
from autobalance.report.phases import phase_labels
from autobalance.report.replayed import step_of
from autobalance.report.rows import legend, picture, row, stretched, strip
from autobalance.units import format_size

_HEIGHT = 72
# Stretches of time of which the least and the most is drawn; a strip has about as many pixels.
_STRETCHES = 500


def memory_curves(plan: Plan, profile: Profile) -> Markup:
    """What is alive on each device from event to event, against its budget.

    Example:
        >>> memory_curves(plan, plan.profile)

    Args:
        plan: the plan.
        profile: that it was made from, of the whole batch.
    """
    timeline, homes = step_of(plan, profile)
    count = max(1, len(timeline.events))
    largest = max(*plan.budgets, *timeline.peaks(homes, len(plan.devices)), 1)
    marks = [(name, position / count) for name, position in timeline.marks]
    usage = timeline.usage(homes, len(plan.devices))
    rows = [_row(plan, index, *usage[index], count, largest, marks) for index in range(len(plan.devices))]
    told = legend((("area", "bytes alive"), ("budget-line", "budget")))
    words = (
        f"From left to right: {count:,} births and deaths of storages, in the order in which they are launched, not "
        f"to a scale of time{_which(timeline.steps)}. Each strip is 0 to {format_size(largest)} high. "
        "A dot marks the peak, and a phase begins at each dotted line."
    )
    return joined(picture(*rows, phase_labels(marks), class_="tall"), told, element("p", words, class_="note"))


def _row(
    plan: Plan,
    index: int,
    positions: Whole,
    alive: Whole,
    count: int,
    largest: int,
    marks: list[tuple[str, float]],
) -> Markup:
    budget = plan.budgets[index]
    peak, at = (int(alive.max()), int(positions[alive.argmax()])) if len(alive) else (0, 0)
    title = f"device {index}: at most {exactly(peak)}, budget {exactly(budget)}"
    path = element("path", element("title", title), d=_outline(*thinned(positions, alive, count), count, largest))
    shapes = [
        element("rect", x=0, y=0, width="100%", height=_HEIGHT, class_="track"),
        *(element("line", x1=percent(x), x2=percent(x), y1=0, y2=_HEIGHT, class_="phase") for _, x in marks if x),
        stretched(path, "0 0 1000 1000", _HEIGHT, class_="area"),
        element("line", x1=0, x2="100%", y1=_level(budget, largest), y2=_level(budget, largest), class_="limit"),
    ]
    if peak:
        dot = element("title", f"peak of device {index}: {exactly(peak)}, at event {at + 1:,}")
        shapes.append(element("circle", dot, cx=percent(at / count), cy=_level(peak, largest), r=4, class_="summit"))
    about = f"device {index}: memory over the step, peak {format_size(peak)}"
    name = device_title(index, plan.devices[index].name)
    figure = f"peak {format_size(peak)}"
    return row(name, strip(shapes, _HEIGHT, about), figure, over=peak > budget)


def _which(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return ""
    return f"; step {steps[0]} makes the optimizer's state, and all further ones are like step {steps[-1]}"


def _level(size: int, largest: int) -> float:
    """Pixels from the top of a strip."""
    return round(_HEIGHT * (1 - size / largest), 2)


def thinned(positions: Whole, alive: Whole, count: int) -> tuple[Whole, Whole]:
    """A curve of few points whose peaks and valleys are those of the whole one, as far as a screen could show them.

    Example:
        >>> thinned(np.array([0, 1]), np.array([512, 0]), count=2)
        (array([0, 1]), array([512,   0]))

    Args:
        positions: of the events.
        alive: bytes after each of them.
        count: of all events, on whatever device.
    """
    if len(positions) <= 2 * _STRETCHES:
        return positions, alive
    stretch = positions * _STRETCHES // count
    starts = np.flatnonzero(np.r_[True, stretch[1:] != stretch[:-1]])
    chosen: set[int] = set()
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        part: NDArray[np.int64] = alive[start:stop]
        chosen |= {int(start + part.argmin()), int(start + part.argmax()), int(stop - 1)}
    kept = np.array(sorted(chosen))
    return positions[kept], alive[kept]


def _outline(positions: Whole, alive: Whole, count: int, largest: int) -> str:
    """A path of steps in a square of 1000, closed along its floor."""
    if not len(positions):
        return ""
    points = zip((positions / count * 1000).tolist(), ((1 - alive / largest) * 1000).tolist(), strict=True)
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in points)
    return f"M0 1000{steps}H1000V1000z"
