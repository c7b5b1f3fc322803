"""A plan and a profile as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import Profile
from autobalance.units import format_size


def plan_table(plan: Plan) -> Group:
    """A plan, one line for each device, with what proves it below.

    Example:
        >>> rich.print(plan_table(plan))
    """
    table = Table(title=_title(plan), title_justify="left", expand=False, show_footer=False)
    table.add_column("device", no_wrap=True)
    table.add_column("blocks", overflow="fold")
    for heading in ("weights", "gradients", "optimizer", "saved", "peak", "budget", "use"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, device in enumerate(plan.devices):
        blocks = plan.blocks_on(index)
        rows = [plan.blocks[block] for block in blocks]
        what = block_ranges(blocks, plan.block_names)
        if index == plan.root:
            what = f"{what}; batch, loss" if blocks else "batch, loss"
        table.add_row(
            str(index) if device.name == f"device {index}" else f"{index} {device.name}",
            what or "(empty)",
            format_size(sum(row.weights + row.buffers for row in rows)),
            format_size(sum(row.gradients for row in rows)),
            format_size(sum(row.optimizer for row in rows)),
            format_size(sum(row.saved for row in rows)),
            format_size(plan.peaks[index]),
            format_size(plan.budgets[index]),
            f"{plan.uses[index]:.1%}",
        )
    return Group(table, *(Text(line) for line in _below(plan)))


def _title(plan: Plan) -> str:
    covered = f", batch: {plan.batch}" if plan.batch else ""
    return f"{len(plan.blocks)} blocks on {len(plan.devices)} devices, policy {plan.policy}{covered}"


def _below(plan: Plan) -> list[str]:
    lines = []
    if plan.bounds:
        waterfall = " → ".join(f"{name} {bound:.1%}" for name, bound in plan.bounds.items())
        largest = max(plan.uses)
        proof = "optimal" if plan.optimal else "not proved optimal"
        lines.append(f"largest use {largest:.1%}, {proof}; no plan can be below: {waterfall}")
    if plan.step_time:
        lines.append(f"predicted step: {plan.step_time * 1e3:.3g} ms ({plan.schedule})")
    lines += plan.notes
    return lines


def block_ranges(blocks: Sequence[int], names: Sequence[str]) -> str:
    """Blocks in words; three or more consecutive ones as a range.

    Example:
        >>> block_ranges([0, 1, 2, 5], ["a", "b", "c", "d", "e", "f"])
        'a … c, f'
    """
    parts: list[str] = []
    start = 0
    while start < len(blocks):
        stop = start + 1
        while stop < len(blocks) and blocks[stop] == blocks[stop - 1] + 1:
            stop += 1
        run = [names[block] for block in blocks[start:stop]]
        parts += [f"{run[0]} … {run[-1]}"] if len(run) > 2 else run
        start = stop
    return ", ".join(parts)


def profile_table(profile: Profile) -> Group:
    """A profile, one line for each block and their sum.

    Example:
        >>> rich.print(profile_table(profile))
    """
    columns = ("weights", "gradients", "optimizer", "buffers", "saved", "forward_transient", "backward_transient")
    table = Table(title=f"{len(profile.blocks)} blocks, batch: {profile.batch or 'not said'}", title_justify="left")
    table.add_column("block", overflow="fold")
    table.add_column("kind", overflow="fold")
    for heading in ("weights", "gradients", "optimizer", "buffers", "saved", "in forward", "in backward"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    for block in profile.blocks:
        table.add_row(
            block.name,
            block.kind,
            *(format_size(getattr(block, column)) for column in columns),
            f"{(block.forward_time + block.backward_time) * 1e3:.3g}",
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        *(format_size(sum(getattr(block, column) for block in profile.blocks)) for column in columns[:5]),
        *(format_size(max(getattr(block, column) for block in profile.blocks)) for column in columns[5:]),
        f"{sum(block.forward_time + block.backward_time for block in profile.blocks) * 1e3:.3g}",
    )
    peak = f"peak on one device: {format_size(profile.peak())}"
    return Group(table, Text(peak), *(Text(note) for note in profile.notes))
