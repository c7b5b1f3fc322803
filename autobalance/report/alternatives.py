"""What could be done instead of splitting the model, by formula."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from autobalance.partitioning.plan import relative_use
from autobalance.partitioning.rivals.alternatives import Alternative
from autobalance.report.columns import common_unit
from autobalance.report.folding import Sentences
from autobalance.report.grid import add_line, grid
from autobalance.units import format_size, format_time


def alternatives_table(alternatives: Sequence[Alternative]) -> Group:
    """One line for each way to run the whole model on every device: memory, bytes sent, time of a step.

    Example:
        >>> rich.print(alternatives_table(alternatives_of(profile, plan.devices, plan.budgets)))

    Args:
        alternatives: at least one, all on the same devices.
    """
    unit, size = common_unit([each for other in alternatives for each in (other.peak, other.budget)])
    told = f"instead of a split, by formula; peak of each device in {unit}, bytes that each device sends per step"
    on_host = any(other.host for other in alternatives)
    columns = ("peak", "use", "fits", *("on host",) * on_host, "sent", "step", "optimizer")
    table = grid(left=("instead",), right=columns)
    for other in alternatives:
        add_line(
            table,
            other.name if other.parts == 1 else f"{other.name}, {other.parts} parts",
            size(other.peak),
            f"{relative_use(other.peak, other.budget):.1%}",
            "yes" if other.fits else "no",
            *([format_size(other.host)] * on_host),
            format_size(other.moved),
            format_time(other.step_time),
            format_time(other.optimizer_time),
        )
    return Group(Sentences((told,)), table, Sentences(tuple(_notes(alternatives))))


def _notes(alternatives: Sequence[Alternative]) -> list[str]:
    """What the figures take for granted; what holds for several is told once."""
    names: dict[str, list[str]] = {}
    for other in alternatives:
        for note in other.notes:
            names.setdefault(note, []).append(other.name)
    return [f"{', '.join(held)}: {note}" for note, held in names.items()]
