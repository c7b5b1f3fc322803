"""Several splits of one model side by side, and beside them what could be done instead of splitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from autobalance.partitioning.plan import relative_use
from autobalance.report.grid import add_line, grid
from autobalance.units import format_size

# With more devices, peaks share a column in which they wrap.
_MOST_COLUMNS = 4


@dataclass(frozen=True)
class Contender:
    """One way to run the model, judged.

    Attributes:
        name: what to call it.
        peaks: most bytes at once on each device; empty: it has no split.
        budgets: bytes that each device may hold.
        step_time: predicted seconds of one step.
        moved: bytes that cross between devices in one step.
        how: schedule and micro-batches, in words.
    """

    name: str
    peaks: tuple[int, ...] = ()
    budgets: tuple[int, ...] = ()
    step_time: float = 0.0
    moved: int = 0
    how: str = ""

    @property
    def largest_use(self) -> float:
        """The largest peak / budget."""
        uses = (relative_use(peak, budget) for peak, budget in zip(self.peaks, self.budgets, strict=True))
        return max(uses, default=0.0)


def comparison_table(contenders: Sequence[Contender]) -> Table:
    """One line for each way: peaks, largest use, whether it fits, time of a step, bytes moved.

    Example:
        >>> rich.print(comparison_table([Contender("by hand", (2**30,), (2**31,))]))

    Args:
        contenders: all on the same devices.
    """
    count = max((len(contender.peaks) for contender in contenders), default=0)
    wide = count > _MOST_COLUMNS
    peaks = ["peak per device"] if wide else [f"peak on {device}" for device in range(count)]
    figures = ["largest use", "fits", "step", "moved"]
    table = grid(left=["split", *peaks], right=figures) if wide else grid(left=["split"], right=[*peaks, *figures])
    for contender in contenders:
        sizes = [format_size(peak) for peak in contender.peaks]
        if not sizes:
            add_line(table, contender.name, *[""] * len(peaks), "", "no", "", "")
            continue
        add_line(
            table,
            contender.name,
            *([", ".join(sizes)] if wide else sizes),
            f"{contender.largest_use:.1%}",
            "yes" if contender.largest_use <= 1 else "no",
            _time(contender),
            format_size(contender.moved),
        )
    return table


def _time(contender: Contender) -> str:
    if not contender.step_time:
        return ""
    return " ".join(part for part in (f"{contender.step_time * 1e3:.3g} ms", contender.how) if part)
