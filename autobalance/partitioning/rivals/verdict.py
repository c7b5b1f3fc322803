"""Which is the better choice here, the plan or what a user would pick instead, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.rivals.alternatives import Alternative
from autobalance.partitioning.score import Score
from autobalance.partitioning.times import optimizer_seconds
from autobalance.units import format_size, format_time

ALIKE = 0.05
"""Predicted times that differ by no more than this share count as equal."""


def verdict(ours: Plan | Score, alternatives: Sequence[Alternative]) -> str:
    """One sentence: which of them is the better choice on these devices, and by how much.

    Among those that fit, the one with the fastest step is better, its optimizer included where ours is known.

    Example:
        >>> verdict(plan, alternatives_of(profile, plan.devices, plan.budgets))
        'This plan is the only one that fits: DDP needs 102.40 GiB, ... of the 79.14 GiB on each device.'

    Args:
        ours: a plan or a score.
        alternatives: for the same batch and devices.
    """
    fitting = [other for other in alternatives if other.fits]
    lacking = [other for other in alternatives if not other.fits]
    if not fitting:
        needs = ", ".join(f"{other.name} needs {format_size(other.peak)}" for other in lacking)
        told = "This plan is the only one that fits" if ours.fits else "Nothing fits here, nor does this plan"
        return f"{told}: {needs} of the {format_size(min(ours.budgets))} on each device."
    optimizer = _optimizer_time(ours)
    seconds = {
        other.name: other.step_time + (other.optimizer_time if optimizer is not None else 0.0) for other in fitting
    }
    best = min(fitting, key=lambda other: seconds[other.name])
    held = f"with {format_size(best.peak)} on each device" + (
        f" and {format_size(best.host)} in the host's memory" if best.host else ""
    )
    if not ours.fits:
        return f"{best.name} is the better choice here: it fits, {held}, and this plan does not."
    here, there = ours.step_time + (optimizer or 0.0), seconds[best.name]
    if not here or not there:
        return f"{best.name} fits as well, {held}; which is faster is not known, as no times are."
    beside = f" ({' and '.join(other.name for other in lacking)} would not)" if lacking else ""
    if there < here * (1 - ALIKE):
        return (
            f"{best.name} is the better choice here: a step takes {format_time(there)}, {1 - there / here:.0%} less "
            f"than the {format_time(here)} of this plan, {held}."
        )
    if here < there * (1 - ALIKE):
        return (
            f"This plan is the better choice here: a step takes {format_time(here)}, {1 - here / there:.0%} less than "
            f"the {format_time(there)} of {best.name}, the fastest alternative that fits{beside}."
        )
    simpler = " and needs no split" if best.name == "DDP" else ""
    return (
        f"{best.name} is as fast as this plan here{simpler}: a step takes {format_time(there)} there, "
        f"{format_time(here)} here, {held}."
    )


def _optimizer_time(ours: Plan | Score) -> float | None:
    """Seconds of the optimizer's step on the device that takes longest; None where a plan was read from a file."""
    if isinstance(ours, Score):
        return max(ours.optimizer_times, default=0.0)
    if ours.profile is None:
        return None
    return max(optimizer_seconds(ours.profile, ours.assignment, ours.devices))
