"""A profile, and what was measured on devices, as tables. All sizes of a table are in one unit, named above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Group
from rich.text import Text

from autobalance.measuring.calibration import Calibration
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.report.columns import common_unit
from autobalance.report.grid import add_line, grid
from autobalance.report.names import name_range
from autobalance.report.surprises import certainty, surprises
from autobalance.units import format_size

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def profile_table(profile: Profile) -> Group:
    """A profile, one line for each run of equal blocks; below them the sums, of transient bytes the largest.

    Example:
        >>> rich.print(profile_table(profile))

    Args:
        profile: to be shown.
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
    unit, size = common_unit(getattr(row, what) for row in profile.blocks for what in shown.values())
    # A column in which all is alike only takes the room of the others.
    dtypes = {row.dtype for row in profile.blocks if row.dtype}
    mixed = ("dtype",) if len(dtypes) > 1 else ()
    weights = f", weights {', '.join(sorted(_SHORT.get(each, each) for each in dtypes))}" if dtypes else ""
    kernels = f", kernels of {profile.target}, {profile.precision}{weights}" if profile.target else ""
    title = f"{len(profile.blocks)} blocks, batch: {profile.batch or 'not said'}{kernels}; sizes in {unit}"
    table = grid(left=("block", "kind", *mixed), right=("count", *shown, "fwd ms", "bwd ms"))
    for _, equal in groupby(profile.blocks, key=lambda row: replace(row, name="")):
        rows = list(equal)
        name = rows[0].name if len(rows) == 1 else name_range(rows[0].name, rows[-1].name)
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

    Args:
        calibrations: to be shown.
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
