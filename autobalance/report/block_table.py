"""All blocks of a plan as an HTML table, with one row for each run of equal ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

from autobalance.partitioning.plan import Plan
from autobalance.profiling.block_cost import BlockCost
from autobalance.report.columns import common_unit
from autobalance.report.markup import Markup, element, joined
from autobalance.report.names import name_range
from autobalance.report.words import samples_of_micro_batch
from autobalance.units import three_figures

_SAVING = {"keep": "", "recompute": "recomputed", "offload": "saved on the host"}
_BYTES: dict[str, Callable[[BlockCost], int]] = {
    "weights": lambda row: row.weights + row.buffers,
    "gradients": lambda row: row.gradients,
    "optimizer": lambda row: row.optimizer,
    "saved": lambda row: row.saved,
    "in forward": lambda row: row.forward_transient,
    "in backward": lambda row: row.backward_transient,
}
_SECONDS: dict[str, Callable[[BlockCost], float]] = {
    "forward": lambda row: row.forward_time,
    "backward": lambda row: row.backward_time,
}


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks that are equal in all that the table shows."""

    first: str
    last: str
    count: int
    row: BlockCost
    device: int
    mark: str


def block_table(plan: Plan) -> Markup:
    """The table, inside a frame that scrolls where it is too wide or too long.

    Example:
        >>> block_table(plan)

    Args:
        plan: to be shown.
    """
    runs = _runs(plan)
    shown = {heading: cost for heading, cost in _BYTES.items() if any(map(cost, plan.blocks))}
    timed = {heading: cost for heading, cost in _SECONDS.items() if any(map(cost, plan.blocks))}
    unit, size = common_unit(cost(row) for cost in shown.values() for row in plan.blocks)
    words = f"Sizes of each block in {unit}{', times in ms' if timed else ''}{_of_what(plan)}."
    marked = any(run.mark for run in runs)
    classed = any(row.kind for row in plan.blocks)
    named = ["blocks", *["class"] * classed, *["memory"] * marked]
    figures = ["count", "device", *shown, *timed]
    head = element(
        "tr",
        *(element("th", heading, scope="col") for heading in named),
        *(element("th", heading, scope="col", class_="number") for heading in figures),
    )
    body = []
    for run in runs:
        name = run.first if run.count == 1 else name_range(run.first, run.last)
        cells = [element("th", name, scope="row")]
        cells += [element("td", run.row.kind)] * classed
        cells += [element("td", run.mark, class_="words")] * marked
        numbers = [str(run.count), str(run.device), *(size(cost(run.row)) for cost in shown.values())]
        numbers += [three_figures(cost(run.row) * 1e3) for cost in timed.values()]
        cells += [element("td", number, class_="number") for number in numbers]
        body.append(element("tr", *cells))
    table = element("table", element("thead", head), element("tbody", *body))
    return joined(element("p", words, class_="lead"), element("div", table, class_="frame", tabindex="0"))


def _of_what(plan: Plan) -> str:
    samples = samples_of_micro_batch(plan)
    size = f" of {samples} sample{'s' * (samples > 1)}" if samples else ""
    return f", for one micro-batch{size}" if plan.micro_batches > 1 else ""


def _runs(plan: Plan) -> list[_Run]:
    marks = [_mark(plan, block) for block in range(len(plan.blocks))]
    entries = list(zip(plan.blocks, plan.assignment, marks, strict=True))
    runs = []
    for _, equal in groupby(entries, key=lambda entry: (replace(entry[0], name=""), *entry[1:])):
        rows = list(equal)
        row, device, mark = rows[0]
        runs.append(_Run(row.name, rows[-1][0].name, len(rows), row, device, mark))
    return runs


def _mark(plan: Plan, block: int) -> str:
    told = [_SAVING[plan.saving[block]]] if plan.saving else []
    told += ["weights on the host"] * (block in plan.streamed)
    return ", ".join(filter(None, told))
