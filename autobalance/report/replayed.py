"""The storage events of a plan's step, as its schedule launches them."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import Timeline, Whole
from autobalance.report.words import stages_of
from autobalance.schedules.launches import launch_order
from autobalance.timelines.meeting import as_met
from autobalance.timelines.micro_batches import interleaved


def profile_of(plan: Plan, profile: Profile | None) -> Profile | None:
    """The profile that a plan was made from: the one given, or the plan's own.

    Example:
        >>> profile_of(Plan.load("plan.json"), Profile.load("profile.json"))

    Raises:
        ValueError: the given one is of another model, batch, optimizer or precision.
    """
    if profile is None:
        return plan.profile
    names = tuple(block.name for block in profile.blocks)
    if names != plan.block_names:
        raise ValueError(
            f"the profile has {len(names)} blocks ({_shortened(names)}), the plan {len(plan.blocks)} "
            f"({_shortened(plan.block_names)}): give the profile that the plan was made from"
        )
    if plan.fingerprint and profile.fingerprint != plan.fingerprint:
        raise ValueError(
            f"the profile (batch: {profile.batch or 'not named'}, {profile.precision}) is not the one that the plan "
            f"was made from (batch: {plan.batch or 'not named'}): give that one, or plan again"
        )
    return profile


def step_of(plan: Plan, profile: Profile) -> tuple[Timeline, Whole]:
    """Storage events of one step, in launch order, and the device of every storage.

    Example:
        >>> timeline, homes = step_of(plan, plan.profile)
        >>> timeline.peaks(homes, len(plan.devices))

    Args:
        plan: the plan.
        profile: that it was made from, of the whole batch.
    """
    parts = plan.micro_batches
    timeline = profile.scaled(-(-profile.batch_size // parts)).timeline if parts > 1 else profile.timeline
    if any(what != "keep" for what in plan.saving):
        from autobalance.timelines.recompute import with_savings

        timeline = with_savings(timeline, plan.saving)
    if parts > 1:
        stages = stages_of(plan)
        order = launch_order(
            plan.schedule, len(stages), parts, devices=[stage.device for stage in stages], training=profile.training
        )
        spans = [(stage.start, stage.stop) for stage in stages]
        timeline = interleaved(timeline, len(plan.blocks), spans, order)
    return as_met(timeline, timeline.homes(plan.assignment, plan.root))


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]}, … {names[-1]}"
