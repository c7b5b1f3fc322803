"""What a plan predicted, and what its run has reached, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from autobalance.partitioning.plan import Plan
from autobalance.report.columns import common_unit
from autobalance.report.grid import add_line, grid
from autobalance.report.names import block_ranges, device_label
from autobalance.units import format_time


def reached_table(plan: Plan, reached: Sequence[int], seconds: float) -> Group:
    """One line for each device: the peak that was predicted, the one that was reached, and the budget.

    Example:
        >>> rich.print(reached_table(plan, [1024, 2048], seconds=0.2))

    Args:
        plan: what was predicted.
        reached: bytes on each device; empty where nobody counts them.
        seconds: of a step.
    """
    unit, size = common_unit([*plan.peaks, *reached])
    table = grid(left=("device", "blocks"), right=("predicted", "reached", "off", "budget"))
    for index, (device, predicted, budget) in enumerate(zip(plan.devices, plan.peaks, plan.budgets, strict=True)):
        peak = reached[index] if reached else None
        blocks = plan.blocks_on(index)
        add_line(
            table,
            device_label(index, device.name),
            block_ranges(blocks, plan.block_names) if blocks else "(empty)",
            size(predicted),
            "-" if peak is None else size(peak),
            "-" if peak is None or not predicted else f"{peak / predicted - 1:+.1%}",
            size(budget),
        )
    times = f"step time: {format_time(seconds)}"
    if plan.step_time:
        times += f", predicted for its forwards and backwards: {format_time(plan.step_time)}"
    return Group(Text(f"peaks of the plan and of the run, in {unit}"), table, Text(times))
