"""Whether a plan is for the model, the batch and the devices that it is used with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autobalance.partitioning.plan import Plan
from autobalance.profiling.fingerprint import differences, parts_of
from autobalance.profiling.profile import Profile
from autobalance.profiling.signature import elements_of
from autobalance.units import format_size

_SHOWN = 3


def refuse_other_profile(plan: Plan, profile: Profile) -> None:
    """Refuse a plan that was made from the profile of another model, batch, optimizer or precision.

    Example:
        >>> refuse_other_profile(Plan.load("plan.json"), Profile.load("profile.json"))     # doctest: +SKIP

    Args:
        plan: made from any profile; one that was made by hand agrees with all whose blocks have its names.
        profile: that the plan is held against.

    Raises:
        ValueError: they differ; the text says in what.
    """
    if plan.block_names != profile.names:
        lacking = [repr(name) for name in profile.names if name not in plan.block_names]
        unknown = [repr(name) for name in plan.block_names if name not in profile.names]
        told = [f"the plan lacks {_listed(lacking)}"] * bool(lacking)
        told += [f"the profile lacks {_listed(unknown)}"] * bool(unknown)
        raise ValueError(
            f"the plan is for another model than the profile: {'; '.join(told) or 'its blocks run in another order'}. "
            f"Make a plan from this profile."
        )
    found = differences(plan.fingerprint, profile.fingerprint)
    if not found:
        return
    told = [f"{name} {ours!r}, not {theirs!r}" for name, (ours, theirs) in found.items() if name != "model"]
    if "model" in found:
        told = [_model_differences(plan, profile), *told]
    raise ValueError(f"the plan is for {'; '.join(told)}, as in the profile. Make a plan from this profile.")


def refuse_other_weights(plan: Plan, held: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a plan for a model whose blocks have other weights.

    Example:
        >>> refuse_other_weights(plan, {"head": (4096, 4608)})     # doctest: +SKIP

    Args:
        plan: blocks without a class, of a profile by hand, are not looked at.
        held: by block the least and most bytes that its weights can take: alone and not rounded, and together with
            those that are shared with other blocks, each rounded up to the pieces that devices give memory in.

    Raises:
        ValueError: some block's weights lie outside; the text names it.
    """
    wrong = [
        (block, held[block.name])
        for block in plan.blocks
        if block.kind and block.name in held and not held[block.name][0] <= block.weights <= held[block.name][1]
    ]
    if not wrong:
        return
    block, (least, _) = wrong[0]
    more = f", and {len(wrong) - 1} more of its blocks differ" if len(wrong) > 1 else ""
    kind = f" of {block.dtype}" if block.dtype else ""
    raise ValueError(
        f"the plan was made for another model: block {block.name!r} has {format_size(block.weights)} of weights there"
        f"{kind}, but {format_size(least)} in this model{more}. Make a plan for this model, or convert its parameters "
        f"to the type that it was planned with."
    )


def refuse_other_devices(plan: Plan, devices: Sequence[tuple[str, int | None]]) -> None:
    """Refuse a plan that needs more of a device than there is of it.

    Example:
        >>> refuse_other_devices(plan, [("cuda:0", 80 * 2**30), ("cuda:1", 80 * 2**30)])

    Args:
        plan: the plan.
        devices: for each device of the plan the name and the bytes of what it stands for, None where nothing limits
            it. Devices of one name are one, whose bytes they share.

    Raises:
        ValueError: one has too little.
    """
    needed: dict[str, int] = {}
    for (name, _), peak in zip(devices, plan.peaks, strict=True):
        needed[name] = needed.get(name, 0) + peak
    for name, capacity in devices:
        if capacity is not None and needed[name] > capacity:
            planned = max(device.capacity for device in plan.devices)
            raise ValueError(
                f"the plan was made for other devices: it needs {format_size(needed[name])} of {name}, which has "
                f"{format_size(capacity)} (it was made for devices of up to {format_size(planned)}). Make a plan for "
                f"these devices."
            )


def batch_elements(plan: Plan) -> int:
    """Elements of all tensors of the largest batch that a plan was made for; 0: it does not know.

    Example:
        >>> batch_elements(plan)
        32

    Args:
        plan: the plan.
    """
    return elements_of(_batch(plan))


def _batch(plan: Plan) -> str:
    return parts_of(plan.fingerprint).get("batch", "")


def refuse_larger_batch(plan: Plan, signature: str) -> None:
    """Refuse a plan for batches that have fewer elements than those it will meet.

    Example:
        >>> refuse_larger_batch(plan, "x=float32[8,3]")

    Args:
        plan: one that does not know its batch agrees with all.
        signature: of the largest batch that it will meet.

    Raises:
        ValueError: the batch is larger.
    """
    most, here = batch_elements(plan), elements_of(signature)
    if most and here > most:
        raise ValueError(
            f"the plan was made for batches of {_batch(plan)}, but here they are of {signature}, {here:,} elements in "
            f"place of {most:,}: a step needs more memory than planned. Make a plan for this batch, or "
            f"take a smaller one."
        )


def _model_differences(plan: Plan, profile: Profile) -> str:
    told = [
        f"{block.name!r} ({block.kind or 'no class'}, {format_size(block.weights)} of weights, in place of "
        f"{other.kind or 'no class'}, {format_size(other.weights)})"
        for block, other in zip(plan.blocks, profile.blocks, strict=True)
        if (block.kind, block.weights, block.buffers) != (other.kind, other.weights, other.buffers)
    ]
    return f"a model with other blocks: {_listed(told)}" if told else "a model whose blocks are tied otherwise"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")
