"""What a plan amounts to, in sentences that its table and its page share."""

from __future__ import annotations

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.stage import Stage
from autobalance.units import format_size, format_time

_TOLD = 3  # devices that are over their budget, the worst first
SAME = 5e-4
"""Figures of objectives that differ by a smaller share look the same in print."""


def format_value(plan: Plan, value: float) -> str:
    """A value of the plan's objective: seconds, or a share of the budget.

    Example:
        >>> format_value(plan, 0.904)
        '90.4%'

    Args:
        plan: whose objective says in which unit.
        value: of it.
    """
    return format_time(value) if plan.objective == "step time" else f"{value:.1%}"


def visits_of(plan: Plan) -> tuple[Stage, ...]:
    """The plan's stages; of a plan that tells none, one for each run of blocks on one device.

    Example:
        >>> [stage.device for stage in visits_of(plan)]

    Args:
        plan: to be told of.
    """
    if plan.stages:
        return plan.stages
    cuts = [block for block in range(1, len(plan.blocks)) if plan.assignment[block] != plan.assignment[block - 1]]
    pairs = zip([0, *cuts], [*cuts, len(plan.blocks)], strict=True)
    return tuple(Stage(start, stop, plan.assignment[start]) for start, stop in pairs if stop > start)


def bubble(plan: Plan) -> float:
    """The share of a step in which a device that has blocks stands still, on average over these devices.

    Example:
        >>> f"{bubble(plan):.0%}"

    Args:
        plan: to be told of.
    """
    devices = {stage.device for stage in plan.stages}
    if not devices or plan.step_time <= 0:
        return 0.0
    busy = plan.micro_batches * sum(stage.time for stage in plan.stages)
    return max(0.0, 1 - busy / (len(devices) * plan.step_time))


def samples_of_micro_batch(plan: Plan) -> int:
    """Samples of the largest micro-batch; 0 where the batch is not known.

    Example:
        >>> samples_of_micro_batch(plan)
        4

    Args:
        plan: to be told of.
    """
    batch = plan.profile.batch_size if plan.profile is not None else 0
    return batch if plan.accumulated else -(-batch // plan.micro_batches)


def schedule_line(plan: Plan) -> str:
    """When what runs, and how long a step takes.

    Example:
        >>> schedule_line(plan)
        'predicted step 1.40 s: 1f1b, 8 micro-batches of 4 samples, bubble 27%'

    Args:
        plan: to be told of.
    """
    parts = [plan.schedule]
    if plan.accumulated and plan.micro_batches > 1:
        parts.append(f"the {plan.micro_batches} batches that a step accumulates as micro-batches")
    elif plan.micro_batches > 1:
        samples = samples_of_micro_batch(plan)
        even = samples and samples * plan.micro_batches == (plan.profile.batch_size if plan.profile else 0)
        size = f" of {'' if even else 'at most '}{samples} sample{'s' * (samples > 1)}" if samples else ""
        parts.append(f"{plan.micro_batches} micro-batches{size}")
    elif len({stage.device for stage in visits_of(plan)}) > 1:
        parts.append("one device at a time")
    if not plan.step_time:
        return f"schedule: {', '.join(parts)}; the profile has no times"
    parts.append(f"bubble {bubble(plan):.0%}")
    return f"predicted step {format_time(plan.step_time)}: {', '.join(parts)}"


def visits_line(plan: Plan) -> str:
    """Which devices a pass visits more than once, and in which order; empty where there are none.

    Example:
        >>> visits_line(plan)
        'devices 0, 1 are visited more than once: a forward runs on devices 0 → 1 → 0 → 1'

    Args:
        plan: to be told of.
    """
    visited = [stage.device for stage in visits_of(plan)]
    again = sorted({device for device in visited if visited.count(device) > 1})
    if not again:
        return ""
    are = f"devices {', '.join(map(str, again))} are" if len(again) > 1 else f"device {again[0]} is"
    return f"{are} visited more than once: a forward runs on devices {' → '.join(map(str, visited))}"


def has_bounds(plan: Plan) -> bool:
    """Whether the plan tells bounds that say something: those of a time that is not known are all 0.

    Example:
        >>> has_bounds(plan)

    Args:
        plan: to be told of.
    """
    return any(plan.bounds.values())


def waterfall_line(plan: Plan) -> str:
    """The lower bounds of the objective, the loosest first, and how far from them the plan is.

    Example:
        >>> waterfall_line(plan)
        'step time: area 1.20 s → indivisible block 1.31 s → transfers 1.35 s → memory 1.40 s = optimal'

    Args:
        plan: to be told of.
    """
    bounds = " → ".join(f"{name} {format_value(plan, bound)}" for name, bound in plan.bounds.items())
    reached = plan.gap <= SAME
    if plan.optimal and reached:
        return f"{plan.objective}: {bounds} = optimal{with_host_step(plan)}"
    return (
        f"{plan.objective}: {bounds}; this plan {format_value(plan, plan.value)}{with_host_step(plan)}, {proof(plan)}"
    )


def with_host_step(plan: Plan) -> str:
    """What the plan's value has in it that its step time has not; nothing where no optimizer runs on the host.

    Example:
        >>> with_host_step(plan)
        " with the optimizer's step on the host"

    Args:
        plan: to be told of.
    """
    is_timed = plan.objective == "step time"
    return " with the optimizer's step on the host" if plan.host_optimizer and is_timed else ""


def proof(plan: Plan) -> str:
    """How good the plan is, by proof, in words.

    Example:
        >>> proof(plan)
        'optimal'

    Args:
        plan: to be told of.
    """
    if plan.optimal:
        return "optimal" if plan.gap <= SAME else f"within {plan.gap:.1%} of the least, for more room in memory"
    if not has_bounds(plan):
        return "without a bound"
    told = f"at most {plan.gap:.1%}" if plan.gap > SAME else "less than 0.1%"
    return f"{told} above the least possible"


def fit_line(plan: Plan) -> str:
    """Whether the plan fits, and where there is the least room.

    Example:
        >>> fit_line(plan)
        'fits: largest use 90.4% on device 1'

    Args:
        plan: to be told of.
    """
    if plan.fits:
        tightest = max(range(len(plan.devices)), key=plan.uses.__getitem__)
        return f"fits: largest use {plan.uses[tightest]:.1%} on device {tightest}"
    above = {
        index: peak - budget
        for index, (peak, budget) in enumerate(zip(plan.peaks, plan.budgets, strict=True))
        if peak > budget
    }
    worst = sorted(above, key=lambda index: -above[index])[:_TOLD]
    told = ", ".join(f"device {index} by {format_size(above[index])}" for index in worst)
    more = f" and {len(above) - len(worst)} more" if len(above) > len(worst) else ""
    return f"does not fit: over the budget are {told}{more}"
