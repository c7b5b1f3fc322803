"""The storage events of a plan's step, as its schedule launches them."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.partitioning.judge import launched
from autobalance.partitioning.micro_profiles import micro_profile
from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import Timeline, Whole
from autobalance.report.words import visits_of
from autobalance.schedules.launches import launch_order
from autobalance.timelines.meeting import as_met


def profile_of(plan: Plan, profile: Profile | None) -> Profile | None:
    """The profile that a plan was made from: the one given, or the plan's own.

    Example:
        >>> profile_of(Plan.load("plan.json"), Profile.load("profile.json"))

    Args:
        plan: the plan.
        profile: None: the plan's own, which one that was loaded has not.

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
    part = micro_profile(profile, plan.micro_batches, accumulated=plan.accumulated)
    visits = visits_of(plan)
    places = [stage.device for stage in visits]
    away = [block for block, device in enumerate(plan.assignment) if device in plan.host_optimizer]
    order = launch_order(plan.schedule, len(visits), plan.micro_batches, devices=places, training=profile.training)
    timeline = launched(part, visits, order, plan.micro_batches, plan.saving, plan.streamed, away)
    return as_met(timeline, timeline.homes(plan.assignment, plan.root))


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]}, … {names[-1]}"
