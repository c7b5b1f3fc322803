"""Names of the phases and steps below a picture of storage events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autobalance.report.markup import Markup, element, percent
from autobalance.report.rows import row, strip

# A name needs this share of the width.
_ROOM = 0.15
# Pixels from the top to the feet of the letters: phases in the first line, steps in the second.
_PHASES, _STEPS, _HEIGHT = 13, 28, 32


def phase_labels(marks: Sequence[tuple[str, float]]) -> Markup:
    """A row with the names that are wide enough to be read: forward, backward, optimizer; step 1, step 2.

    Example:
        >>> phase_labels([("step 1 forward", 0.1), ("step 1 backward", 0.4)])

    Args:
        marks: names, such as "step 1 forward", and where what they name begins, as a share of the width.
    """
    if not marks:
        return Markup()
    stops = [*(begin for _, begin in marks[1:]), 1.0]
    phases = [(name, begin, stop) for (name, begin), stop in zip(marks, stops, strict=True)]
    labels = [_label(name.rpartition(" ")[2], begin, stop, _PHASES) for name, begin, stop in phases]
    for step, members in groupby(phases, key=lambda phase: phase[0].rpartition(" ")[0]):
        spans = list(members)
        labels.append(_label(step, spans[0][1], spans[-1][2], _STEPS))
    shown = [label for label in labels if label]
    return row("", strip(shown, _HEIGHT, "phases of the steps"), "") if shown else Markup()


def _label(name: str, begin: float, stop: float, feet: int) -> Markup:
    if not name or stop - begin < _ROOM:
        return Markup()
    return element("text", name, x=percent((begin + stop) / 2), y=feet, text_anchor="middle", class_="small")
