"""The lower bounds of a plan's objective as a waterfall: what each of them adds to the one before."""

from __future__ import annotations

from autobalance.partitioning.plan import Plan
from autobalance.report.markup import Markup, element, joined
from autobalance.report.rows import bar, legend, picture, row, strip
from autobalance.report.words import format_value, has_bounds, proof, with_host_step

_HEIGHT = 22
_MEANING = {
    "area": "all work, or all memory, shared out evenly over all devices",
    "indivisible block": "no block can be cut in two",
    "transfers": "what crosses between devices takes time",
    "memory": "every device has to stay within its budget: the least of all plans of this kind",
}


def waterfall(plan: Plan) -> Markup:
    """A bar for each bound, the loosest first, and one for the plan.

    Example:
        >>> waterfall(plan)

    Args:
        plan: to be shown.
    """
    if not has_bounds(plan):
        return element("p", "The plan tells no bounds.", class_="note")
    largest = max(*plan.bounds.values(), plan.value)
    rows, below = [], 0.0
    for name, bound in plan.bounds.items():
        told = format_value(plan, bound)
        title = f"{name}: {told}; {_MEANING.get(name, 'a lower bound')}"
        shapes = [bar(0, below / largest, _HEIGHT - 6, "before", title, top=3)] if below else []
        shapes.append(bar(below / largest, max(bound, below) / largest, _HEIGHT - 6, "added", title, top=3))
        rows.append(row(name, strip(shapes, _HEIGHT, title), f"{told}{_step(plan, below, bound)}"))
        below = max(below, bound)
    told = f"{format_value(plan, plan.value)}{with_host_step(plan)}"
    shapes = [bar(0, plan.value / largest, _HEIGHT - 6, "reached", f"this plan: {told}, {proof(plan)}", top=3)]
    rows.append(row("this plan", strip(shapes, _HEIGHT, f"this plan: {told}"), told))
    words = [element("li", element("b", name), f": {_MEANING[name]}") for name in plan.bounds if name in _MEANING]
    entries = (("before", "by the bounds above it"), ("added", "what this bound adds"), ("reached", "this plan"))
    return joined(picture(*rows), legend(entries), element("ul", *words, class_="meaning"))


def _step(plan: Plan, below: float, bound: float) -> str:
    return f" (+{bound / below - 1:.1%})" if below and bound > below * (1 + 5e-4) else ""
