"""The memory of every device as a matplotlib figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobalance.partitioning.plan import Plan
from autobalance.report.bars import WORDS
from autobalance.report.columns import common_scale
from autobalance.report.names import device_label
from autobalance.report.shares import PARTS, shares_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = dict(zip(PARTS, ("#3567ac", "#c46f12", "#2f8558", "#8a4fa8", "#8a949e"), strict=True))
_SHORT = WORDS | {"saved": "saved for backward, in flight", "rest": "the rest"}
_INCHES_EACH = 0.42


def plot_plan(plan: Plan) -> tuple[Figure, Axes]:
    """The memory of every device by what it is for, against its budget.

    Example:
        >>> fig, ax = plot_plan(plan)
        >>> fig.savefig("plan.png")

    Args:
        plan: the plan.

    Returns:
        The figure and its axes, of which pyplot does not know: nothing opens, nothing has to be closed.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plan.plot() draws with matplotlib, which is not installed: pip install 'autobalance[plot]', or write a "
            "page that needs nothing with plan.report('plan.html')"
        ) from error
    count = len(plan.devices)
    figure = Figure(figsize=(9, 1.6 + _INCHES_EACH * count), layout="constrained")
    axes = figure.add_subplot()
    unit, scale = common_scale(plan.peaks)
    _draw_stacks(axes, plan, scale)
    for index, budget in enumerate(plan.budgets):
        label = "budget" if index == 0 else "_again"
        axes.vlines(budget / scale, index - 0.45, index + 0.45, color="#b3261e", linewidth=2, label=label)
    names = [device_label(index, device.name) for index, device in enumerate(plan.devices)]
    axes.set_yticks(range(count), labels=names, parse_math=False)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0, 1.06 * max(*plan.peaks, *plan.budgets, 1) / scale)
    axes.set_xlabel(f"peak in {unit}")
    axes.set_ylabel("device")
    title = f"{len(plan.blocks)} blocks on {count} device{'s' * (count > 1)}, largest use {max(plan.uses):.1%}"
    axes.set_title(title, parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure, axes


def _draw_stacks(axes: Axes, plan: Plan, scale: int) -> None:
    stacks = [share.stack for share in shares_of(plan)]
    lefts = [0] * len(stacks)
    for number, part in enumerate(PARTS):
        sizes = [stack[number] for stack in stacks]
        if any(sizes):
            places = range(len(stacks))
            widths, starts = [size / scale for size in sizes], [left / scale for left in lefts]
            axes.barh(places, widths, left=starts, height=0.62, color=_COLOURS[part], label=_SHORT[part])
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
