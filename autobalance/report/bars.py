"""The memory of every device by what it is for, against its budget."""

from __future__ import annotations

from autobalance.partitioning.plan import Plan
from autobalance.report.columns import common_scale
from autobalance.report.markup import Markup, element, joined, percent
from autobalance.report.names import device_title
from autobalance.report.rows import axis, bar, legend, picture, row, strip
from autobalance.report.shares import PARTS, Shares, shares_of
from autobalance.units import format_size

_HEIGHT = 26
WORDS = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved for backward, of all micro-batches in flight",
    "rest": "the rest: batch, loss, what lives inside one block or one optimizer step",
}


def memory_bars(plan: Plan) -> Markup:
    """One stacked bar for each device, as long as its peak.

    Example:
        >>> memory_bars(plan)

    Args:
        plan: to be shown.
    """
    shares = shares_of(plan)
    largest = max(*plan.budgets, *plan.peaks, 1)
    unit, scale = common_scale(plan.peaks)
    rows = [_row(plan, index, share, largest) for index, share in enumerate(shares)]
    rows.append(axis(largest / scale, lambda tick: f"{tick:,g}", unit))
    used = [part for number, part in enumerate(PARTS) if any(share.stack[number] for share in shares)]
    told = legend([*((part, WORDS[part]) for part in used), ("budget-mark", "budget")])
    return joined(picture(*rows), told, _caution(shares))


def _row(plan: Plan, index: int, share: Shares, largest: int) -> Markup:
    name = device_title(index, plan.devices[index].name)
    peak, budget = plan.peaks[index], plan.budgets[index]
    shapes = [bar(0, budget / largest, _HEIGHT, "track", f"budget: {exactly(budget)}")]
    start = 0
    for part, size in zip(PARTS, share.stack, strict=True):
        if size:
            title = f"device {index}, {WORDS[part]}: {exactly(size)}"
            shapes.append(bar(start / largest, (start + size) / largest, _HEIGHT - 8, part, title, top=4))
        start += size
    mark = percent(budget / largest)
    shapes.append(element("line", element("title", f"budget: {exactly(budget)}"), x1=mark, x2=mark, y1=0, y2=_HEIGHT))
    about = f"device {index}: peak {format_size(peak)} of a budget of {format_size(budget)}"
    unit, scale = common_scale(plan.peaks)
    figure = f"{peak / scale:,.2f} / {budget / scale:,.2f} {unit}, {plan.uses[index]:.1%}"
    return row(name, strip(shapes, _HEIGHT, about, class_="memory"), figure, over=peak > budget)


def _caution(shares: tuple[Shares, ...]) -> Markup:
    words = "Each part is drawn at its most, the rest is what they leave of the peak."
    if any(share.weights + share.gradients + share.optimizer + share.saved > share.peak for share in shares):
        words += (
            " On some devices the parts are more than the peak together, since they are not all alive at one instant: "
            "gradients come while saved tensors go. There, a bar shows of each part what those before it leave."
        )
    return element("p", words, class_="note")


def exactly(size: int) -> str:
    """A size in the largest unit that suits it, and to the byte.

    Example:
        >>> exactly(1536)
        '1.50 KiB (1,536 B)'

    Args:
        size: bytes.
    """
    return f"{format_size(size)} ({size:,} B)" if size >= 1024 else format_size(size)
