"""The best plan by the replay of a profile, checked by a trace with its placement installed."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.execution.running import running_of
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.search import plan as search
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Forecast, Profiler
from autobalance.strategy.options import Options
from autobalance.units import format_size

ATTEMPTS = 8  # plans that are traced before giving up; one is enough unless budgets are tight to the last kilobyte


def checked_plan(
    profiler: Profiler, profile: Profile, devices: Sequence[Device], options: Options, window: int = 0
) -> Plan:
    """Search until the trace with the placement installed keeps every budget.

    The search scores by replay; what it does not see (a copy that two blocks could share, say) is found by the trace,
    and held against the budgets of the next search.

    Args:
        profiler: traces placements.
        profile: what the blocks cost.
        devices: what there is.
        options: how to plan.
        window: batches that one step takes as its micro-batches; 0: as the options say.

    Raises:
        InfeasiblePlanError: if no plan fits, or none of the plans that the search found does when installed.
    """
    excess = [0] * len(devices)
    for _ in range(ATTEMPTS):
        plan = searched(profile, devices, options, excess, window)
        found = forecast(profiler, plan)
        peaks = [device.peak for device in found]
        if all(peak <= budget for peak, budget in zip(peaks, plan.budgets, strict=True)):
            return plan.with_peaks(peaks, [_highest(plan, found)])
        excess = [
            max(before, peak - replayed) for before, peak, replayed in zip(excess, peaks, plan.peaks, strict=True)
        ]
    raise _never_fits(plan, peaks)


def searched(
    profile: Profile,
    devices: Sequence[Device],
    options: Options,
    excess: Sequence[int] | None = None,
    window: int = 0,
) -> Plan:
    """The best plan by the replay of the profile, not traced with its placement installed yet.

    Args:
        profile: what the blocks cost.
        devices: what there is.
        options: how to plan.
        excess: bytes by which each device is known to stand above the replay.
        window: as for `checked_plan`.

    Raises:
        InfeasiblePlanError: if no plan fits.
    """
    return search(
        profile,
        list(devices),
        policy=options.policy,
        micro_batches=window or options.micro_batches,
        schedule=options.schedule,
        max_memory=options.max_memory,
        reserve=options.reserve,
        pin=options.pin,
        recompute=options.recompute,
        offload=options.offload,
        excess=excess,
        accumulated=window > 0,
    )


def forecast(profiler: Profiler, plan: Plan) -> list[Forecast]:
    """Peaks of a plan, traced with its placement installed.

    Args:
        profiler: traces placements.
        plan: the plan.
    """
    return profiler.forecast(
        plan.block_names, plan.assignment, plan.loose_map, plan.root, len(plan.devices), running_of(plan)
    )


def _highest(plan: Plan, found: Sequence[Forecast]) -> str:
    uses = [device.peak / max(1, budget) for device, budget in zip(found, plan.budgets, strict=True)]
    fullest = max(range(len(uses)), key=uses.__getitem__)
    return f"the highest use is reached in: {found[fullest].phase} ({plan.devices[fullest].name})"


def _never_fits(plan: Plan, peaks: Sequence[int]) -> InfeasiblePlanError:
    lines = [
        f"  {device.name}: need {format_size(peak)}, budget {format_size(budget)}, "
        f"short of {format_size(max(0, peak - budget))}"
        for device, peak, budget in zip(plan.devices, peaks, plan.budgets, strict=True)
    ]
    return InfeasiblePlanError(
        f"none of the {ATTEMPTS} best plans keeps its budgets when its placement is traced; the last one:\n"
        + "\n".join(lines)
        + "\nA smaller batch, more devices or a few more kilobytes of budget will help.",
        need=tuple(peaks),
        budget=plan.budgets,
    )
