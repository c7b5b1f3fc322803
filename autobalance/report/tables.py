"""A plan and a profile as tables. All sizes of a table are in one unit, which the line above it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Group
from rich.text import Text

from autobalance.measuring.calibration import Calibration
from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.report.grid import add_line, grid
from autobalance.report.surprises import certainty, surprises
from autobalance.units import format_size


def plan_table(plan: Plan) -> Group:
    """A plan, one line for each device, with what proves it below.

    Example:
        >>> rich.print(plan_table(plan))
    """
    unit, size = _one_unit(max(plan.peaks))
    covered = f", batch: {plan.batch}" if plan.batch else ""
    title = f"{len(plan.blocks)} blocks on {len(plan.devices)} devices, policy {plan.policy}{covered}; sizes in {unit}"
    costs: dict[str, Callable[[BlockCost], int]] = {
        "weights": lambda block: block.weights + block.buffers,
        "grads": lambda block: block.gradients,
        "optim": lambda block: block.optimizer,
        "saved": lambda block: block.saved,
    }
    # A column of nothing but zeros, as in inference, only takes the room of the others.
    shown = {heading: cost for heading, cost in costs.items() if any(map(cost, plan.blocks))}
    table = grid(left=("device", "blocks"), right=(*shown, "peak", "budget", "use"))
    for index, device in enumerate(plan.devices):
        blocks = plan.blocks_on(index)
        held = block_ranges(blocks, plan.block_names)
        if index == plan.root:
            held = f"{held}; batch, loss" if blocks else "batch, loss"
        add_line(
            table,
            str(index) if device.name == f"device {index}" else f"{index} {device.name}",
            held or "(empty)",
            *(size(sum(cost(plan.blocks[block]) for block in blocks)) for cost in shown.values()),
            size(plan.peaks[index]),
            size(plan.budgets[index]),
            f"{plan.uses[index]:.1%}",
        )
    return Group(Text(title), table, *(Text(line) for line in _below(plan)))


def _below(plan: Plan) -> list[str]:
    lines = []
    if plan.bounds:
        waterfall = " → ".join(f"{name} {bound:.1%}" for name, bound in plan.bounds.items())
        proof = "optimal" if plan.optimal else "not proved optimal"
        lines.append(f"largest use {max(plan.uses):.1%}, {proof}; lower bounds: {waterfall}")
    if plan.step_time:
        lines.append(f"predicted step: {plan.step_time * 1e3:.3g} ms ({plan.schedule})")
    lines += plan.notes
    return lines


def block_ranges(blocks: Sequence[int], names: Sequence[str]) -> str:
    """Blocks in words; three or more consecutive ones as a range.

    Example:
        >>> block_ranges([0, 1, 2, 4], ["layers.0", "layers.1", "layers.2", "norm", "head"])
        'layers.0 … 2, head'
    """
    parts: list[str] = []
    start = 0
    while start < len(blocks):
        stop = start + 1
        while stop < len(blocks) and blocks[stop] == blocks[stop - 1] + 1:
            stop += 1
        run = [names[block] for block in blocks[start:stop]]
        parts += [_range(run[0], run[-1])] if len(run) > 2 else run
        start = stop
    return ", ".join(parts)


def _range(first: str, last: str) -> str:
    parent, _, child = last.rpartition(".")
    return f"{first} … {child if first.rpartition('.')[0] == parent else last}"


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def profile_table(profile: Profile) -> Group:
    """A profile, one line for each run of equal blocks; below them the sums, of transient bytes the largest.

    Example:
        >>> rich.print(profile_table(profile))
    """
    every = {
        "weights": "weights",
        "grads": "gradients",
        "optim": "optimizer",
        "buffers": "buffers",
        "saved": "saved",
        "in fwd": "forward_transient",
        "in bwd": "backward_transient",
    }
    shown = {heading: what for heading, what in every.items() if any(getattr(row, what) for row in profile.blocks)}
    unit, size = _one_unit(max((getattr(row, what) for row in profile.blocks for what in shown.values()), default=0))
    # A column in which all is alike only takes the room of the others.
    dtypes = {row.dtype for row in profile.blocks if row.dtype}
    mixed = ("dtype",) if len(dtypes) > 1 else ()
    weights = f", weights {', '.join(sorted(_SHORT.get(each, each) for each in dtypes))}" if dtypes else ""
    kernels = f", kernels of {profile.target}, {profile.precision}{weights}" if profile.target else ""
    title = f"{len(profile.blocks)} blocks, batch: {profile.batch or 'not said'}{kernels}; sizes in {unit}"
    table = grid(left=("block", "kind", *mixed), right=("count", *shown, "fwd ms", "bwd ms"))
    for _, equal in groupby(profile.blocks, key=lambda row: replace(row, name="")):
        rows = list(equal)
        name = rows[0].name if len(rows) == 1 else _range(rows[0].name, rows[-1].name)
        costs = (size(getattr(rows[0], what)) for what in shown.values())
        dtype = [_SHORT.get(rows[0].dtype, rows[0].dtype)] * len(mixed)
        add_line(table, name, rows[0].kind, *dtype, str(len(rows)), *costs, *_milliseconds(rows[:1]))
    table.add_section()
    totals = [
        size((max if what.endswith("transient") else sum)(getattr(row, what) for row in profile.blocks))
        for what in shown.values()
    ]
    add_line(table, "all", "", *[""] * len(mixed), str(len(profile.blocks)), *totals, *_milliseconds(profile.blocks))
    return Group(Text(title), table, *(Text(line) for line in _below_profile(profile)))


def _below_profile(profile: Profile) -> list[str]:
    peaks = f"peak if all sat on one device: {format_size(profile.peak())}"
    if len(profile.timeline.steps) > 1:
        first, last = profile.timeline.steps[0], profile.timeline.steps[-1]
        peaks += f" (step {first}: {format_size(profile.peak(first))}, later: {format_size(profile.peak(last))})"
    lines = [peaks]
    if profile.parts.exact:
        lines.append(certainty(profile))
    return [*lines, *surprises(profile), *profile.notes]


def calibration_table(calibrations: Sequence[Calibration]) -> Group:
    """What was measured on devices, one line for each kind.

    Example:
        >>> rich.print(calibration_table(calibrate()))
    """
    kinds = sorted({kind for calibration in calibrations for kind in calibration.flops})
    table = grid(left=("device",), right=("context", "workspaces", *(f"{kind} TFLOP/s" for kind in kinds), "GB/s"))
    for calibration in {each.identity: each for each in calibrations}.values():
        add_line(
            table,
            calibration.identity.name,
            format_size(calibration.context),
            format_size(calibration.workspaces),
            *(f"{calibration.flops.get(kind, 0) / 1e12:.3g}" for kind in kinds),
            f"{calibration.bandwidth / 1e9:.3g}",
        )
    return Group(table)


def _milliseconds(rows: Sequence[BlockCost]) -> tuple[str, str]:
    forward, backward = sum(row.forward_time for row in rows), sum(row.backward_time for row in rows)
    return _figure(forward * 1e3), _figure(backward * 1e3)


def _figure(number: float) -> str:
    """Three figures, and all of those before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _one_unit(largest: int) -> tuple[str, Callable[[int], str]]:
    """The unit in which the largest size is at least one, and how a size is written in it."""
    scales = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((unit for unit, scale in scales.items() if largest >= scale), "bytes")
    if unit == "bytes":
        return unit, str
    return unit, lambda size: f"{size / scales[unit]:.2f}"
