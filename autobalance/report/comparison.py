"""Several splits of one model side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

from autobalance.partitioning.plan import relative_use
from autobalance.report.columns import common_unit
from autobalance.report.folding import Sentences
from autobalance.report.grid import add_line, grid
from autobalance.units import format_size, format_time


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


@dataclass(frozen=True)
class ComparisonTable:
    """One line for each way, below one with the budgets.

    Where a column for each device would be too wide for the terminal, all peaks of a way share one, in which they go on
    in the next line between two figures.

    Attributes:
        contenders: all on the same devices.
    """

    contenders: tuple[Contender, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(together=False)
        if Measurement.get(console, options.update(width=10_000), table).maximum > options.max_width:
            table = self._table(together=True)
        yield Sentences((f"peaks and budgets in {common_unit(self._sizes)[0]}, bytes moved between devices per step",))
        yield table

    @property
    def _sizes(self) -> list[int]:
        return [size for each in self.contenders for size in (*each.peaks, *each.budgets)]

    def _table(self, *, together: bool) -> Table:
        _, size = common_unit(self._sizes)
        count = max((len(each.peaks) for each in self.contenders), default=0)
        devices = [f"peak {device}" for device in range(count)]
        figures = ["use", "fits", "step", "moved"]
        if together:
            table = grid(left=["split", f"peaks of {count} devices"], right=figures)
        else:
            table = grid(left=["split"], right=[*devices, *figures])
        budgets = next((each.budgets for each in self.contenders if each.budgets), ())
        lines = [("(budget)", budgets, ("", "", "", ""))]
        lines += [(_name(each), each.peaks, _judgement(each)) for each in self.contenders]
        for name, sizes, figure in lines:
            cells = [size(nbytes) for nbytes in sizes] or [""] * count
            add_line(table, name, *([" ".join(cells)] if together else cells), *figure)
        return table


def comparison_table(contenders: Sequence[Contender]) -> ComparisonTable:
    """One line for each way: peaks, the largest peak / budget, whether it fits, time of a step, bytes moved.

    Example:
        >>> rich.print(comparison_table([Contender("by hand", (2**30,), (2**31,))]))

    Args:
        contenders: all on the same devices.
    """
    return ComparisonTable(tuple(contenders))


def _name(contender: Contender) -> str:
    return " ".join(filter(None, (contender.name, contender.how)))


def _judgement(contender: Contender) -> tuple[str, str, str, str]:
    if not contender.peaks:
        return "", "no", "", ""
    step = format_time(contender.step_time) if contender.step_time else ""
    fits = "yes" if contender.largest_use <= 1 else "no"
    return f"{contender.largest_use:.1%}", fits, step, format_size(contender.moved)
