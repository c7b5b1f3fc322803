"""What a plan predicted, and what its run has reached, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autobalance.partitioning.plan import Plan
from autobalance.report.columns import common_unit
from autobalance.report.folding import Sentences
from autobalance.report.grid import add_line, grid
from autobalance.report.names import block_ranges, device_label
from autobalance.units import format_time


def reached_table(
    plan: Plan,
    reached: Sequence[int],
    seconds: float | None,
    clock: str = "",
    stage_seconds: Sequence[float | None] = (),
) -> Group:
    """Peaks, one line for each device, and times, one line for each stage, as predicted and as reached.

    Example:
        >>> rich.print(reached_table(plan, [1024, 2048], 0.2, "by the host's clock", stage_seconds=[0.09, 0.11]))

    Args:
        plan: what was predicted.
        reached: bytes on each device; empty where nobody counts them.
        seconds: of a step, with its optimizer's; None where its clock was started meanwhile.
        clock: that told them, in words that follow a time.
        stage_seconds: of a micro-batch in each stage, there and back; empty where nobody measures them, None for a
            stage of which nothing was seen.
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
    if seconds is None:
        times = ["step time: not measured, as the clock was started in the midst of the step"]
    else:
        times = [f"step time, with the optimizer's: {format_time(seconds)} {clock}".rstrip()]
    if plan.step_time:
        times.append(
            f"predicted for its forwards and backwards, without the optimizer's: {format_time(plan.step_time)}"
        )
    return Group(
        Text(f"peaks of the plan and of the run, in {unit}"),
        table,
        *_stage_lines(plan, stage_seconds),
        Sentences(tuple(times)),
    )


def _stage_lines(plan: Plan, seconds: Sequence[float | None]) -> tuple[RenderableType, ...]:
    if not plan.stages:
        return ()
    if not seconds:
        return (
            Text(
                "times of the stages: not measured. That takes CUDA devices, or simulated ones whose clock was started "
                "with torch.simulated.reset_clock() before the step."
            ),
        )
    table = grid(left=("stage", "device", "blocks"), right=("predicted", "reached", "off"))
    for number, (stage, took) in enumerate(zip(plan.stages, seconds, strict=True)):
        predicted = stage.busy
        add_line(
            table,
            str(number),
            device_label(stage.device, plan.devices[stage.device].name),
            block_ranges(stage.blocks, plan.block_names),
            format_time(predicted),
            "-" if took is None else format_time(took),
            "-" if took is None or not predicted else f"{took / predicted - 1:+.1%}",
        )
    return Text("times of the stages by the devices' clock, for a micro-batch there and back, without transfers"), table
