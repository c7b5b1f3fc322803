"""A plan as a table. All sizes are in one unit and all times in another, which the line above it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult

from autobalance.partitioning.plan import Plan
from autobalance.report.columns import common_unit
from autobalance.report.folding import Sentences, fold_names
from autobalance.report.grid import add_line, grid
from autobalance.report.names import block_ranges, device_label
from autobalance.report.shares import Shares, shares_of
from autobalance.report.words import fit_line, has_bounds, schedule_line, visits_line, waterfall_line
from autobalance.units import three_figures

# What stands between and around columns, and what a column of words is given before columns of figures are merged.
_BETWEEN = 2
_AROUND = 1
_WORDS = range(20, 31)

# Ways to save room, tried in this order until the table is as narrow as the terminal.
_ONE_TIME, _ONE_STATIC, _ONE_SAVED = range(1, 4)


@dataclass(frozen=True)
class PlanTable:
    """A plan, one line for each device, with what proves it below; figures are whole at 80 columns and more.

    Example:
        >>> rich.print(PlanTable(plan))

    Attributes:
        plan: to be shown.
    """

    plan: Plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan, shares = self.plan, shares_of(self.plan)
        unit, size = common_unit([*plan.peaks, *(share.saved for share in shares)])
        names = _device_names(plan)
        held = [held_by(plan, index) or "(empty)" for index in range(len(plan.devices))]
        for saved_room in range(_ONE_SAVED + 1):
            columns = _columns(plan, shares, size, saved_room)
            room = options.max_width - _width(names, columns)
            if room >= _width_of_words(held):
                break
        yield Sentences((_title(plan, unit),))
        table = grid(left=("device", "blocks"), right=tuple(columns))
        for index, name in enumerate(names):
            words = "\n".join(fold_names(held[index], max(room, len("blocks"))))
            add_line(table, name, words, *(cells[index] for cells in columns.values()))
        yield table
        yield Sentences(tuple(_below(plan)))


def plan_table(plan: Plan) -> PlanTable:
    """A plan, one line for each device, with what proves it below.

    Example:
        >>> rich.print(plan_table(plan))

    Args:
        plan: to be shown.
    """
    return PlanTable(plan)


def held_by(plan: Plan, device: int) -> str:
    """What is on a device, in words: ranges of blocks, how they save memory, batch and loss.

    Example:
        >>> held_by(plan, 1)
        'layers.4 … 7, head; recomputed: layers.4 … 6; batch, loss'

    Args:
        plan: the plan.
        device: position of the device.
    """
    blocks, names = plan.blocks_on(device), plan.block_names
    told = [block_ranges(blocks, names)] if blocks else []
    for what, word in (("recompute", "recomputed"), ("offload", "saved on the host")):
        chosen = [block for block in blocks if plan.saving and plan.saving[block] == what]
        if chosen:
            told.append(f"{word}: {_all_or(chosen, blocks, names)}")
    streamed = [block for block in blocks if block in plan.streamed]
    if streamed:
        told.append(f"weights on the host: {_all_or(streamed, blocks, names)}")
    if device in plan.host_optimizer:
        told.append("optimizer on the host")
    if device == plan.root:
        told.append("batch, loss")
    return "; ".join(told)


def _all_or(chosen: Sequence[int], blocks: Sequence[int], names: Sequence[str]) -> str:
    return "all" if len(chosen) == len(blocks) else block_ranges(chosen, names)


def _device_names(plan: Plan) -> list[str]:
    """Devices of one name are told apart by their position alone; the title has the name."""
    alike = len({device.name for device in plan.devices}) == 1
    return [str(index) if alike else device_label(index, device.name) for index, device in enumerate(plan.devices)]


def _title(plan: Plan, unit: str) -> str:
    names = {device.name for device in plan.devices}
    several = f"{len(plan.devices)} devices" if len(plan.devices) > 1 else "1 device"
    devices = f"{several} ({names.pop()})" if len(names) == 1 and plan.devices[0].name != "device 0" else several
    covered = f", batch: {plan.batch}" if plan.batch else ""
    times = ", times of a micro-batch in ms" if plan.micro_batches > 1 and plan.step_time else ""
    return f"{len(plan.blocks)} blocks on {devices}, policy {plan.policy}{covered}; sizes in {unit}{times}"


def _columns(
    plan: Plan, shares: Sequence[Shares], size: Callable[[float], str], saved_room: int
) -> dict[str, list[str]]:
    """Cells of all columns of figures, by heading."""
    return {
        **_static(shares, size, merged=saved_room >= _ONE_STATIC),
        **_saved(shares, size, merged=saved_room >= _ONE_SAVED),
        "peak": [size(peak) for peak in plan.peaks],
        "budget": [size(budget) for budget in plan.budgets],
        "use": [f"{use:.1%}" for use in plan.uses],
        **_times(shares, merged=saved_room >= _ONE_TIME),
    }


def _static(shares: Sequence[Shares], size: Callable[[float], str], *, merged: bool) -> dict[str, list[str]]:
    parts = {
        "weights": [share.weights for share in shares],
        "grads": [share.gradients for share in shares],
        "optim": [share.optimizer for share in shares],
    }
    # A column of nothing but zeros only takes the room of the others.
    parts = {heading: cells for heading, cells in parts.items() if any(cells)}
    if merged and len(parts) > 1:
        parts = {"static": [sum(cells) for cells in zip(*parts.values(), strict=True)]}
    return {heading: [size(cell) for cell in cells] for heading, cells in parts.items()}


def _saved(shares: Sequence[Shares], size: Callable[[float], str], *, merged: bool) -> dict[str, list[str]]:
    if not any(share.saved for share in shares):
        return {}
    in_flight = [share.in_flight for share in shares]
    if merged or max(max(counts, default=0) for counts in in_flight) <= 1:
        return {"saved": [size(share.saved) for share in shares]}
    if all(len(counts) <= 1 for counts in in_flight):
        cells = [
            f"{share.in_flight[0]} x {size(share.saved / share.in_flight[0])}" if share.in_flight else size(0)
            for share in shares
        ]
        return {"saved": cells}
    return {
        "saved": [size(share.saved) for share in shares],
        "in flight": ["+".join(map(str, counts)) or "0" for counts in in_flight],
    }


def _times(shares: Sequence[Shares], *, merged: bool) -> dict[str, list[str]]:
    parts = {
        "fwd ms": [share.forward for share in shares],
        "bwd ms": [share.backward for share in shares],
        "recv ms": [share.receive for share in shares],
    }
    parts = {heading: cells for heading, cells in parts.items() if any(cells) and not merged}
    if any(share.time for share in shares):
        parts["stage ms"] = [share.time for share in shares]
    return {heading: [three_figures(cell * 1e3) if cell else "0" for cell in cells] for heading, cells in parts.items()}


def _width(names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> int:
    """Of everything but the column of words."""
    figures = [max(map(len, (heading, *cells))) for heading, cells in columns.items()]
    return max(map(len, ("device", *names))) + sum(figures) + _BETWEEN * (len(figures) + 2) + _AROUND


def _width_of_words(held: Sequence[str]) -> int:
    longest = max(len(word) for words in held for word in words.split())
    return min(max(longest, _WORDS.start), _WORDS.stop - 1, max(map(len, held)))


def _below(plan: Plan) -> list[str]:
    lines = [fit_line(plan), schedule_line(plan), *filter(None, [visits_line(plan)])]
    if has_bounds(plan):
        lines.append(waterfall_line(plan))
    return [*lines, *plan.advice, *plan.notes]
