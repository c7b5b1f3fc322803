"""What is different about another plan, in words."""

from __future__ import annotations

from collections.abc import Iterator

from autobalance.partitioning.plan import Plan

_SHOWN = 3


def changes(before: Plan, after: Plan) -> str:
    """What changes from one plan to the next, for the same model on the same devices.

    Example:
        >>> changes(plan, smaller)
        'block moves: layers.3 from device 0 to 1; 4 micro-batches instead of 2'

    Args:
        before: the one that was.
        after: the one that is to be.
    """
    return "; ".join(_changes(before, after)) or "nothing moves"


def _changes(before: Plan, after: Plan) -> Iterator[str]:
    old = dict(zip(before.block_names, before.assignment, strict=True))
    moved = [
        f"{name} from device {old[name]} to {device}"
        for name, device in zip(after.block_names, after.assignment, strict=True)
        if old.get(name, device) != device
    ]
    if moved:
        more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
        yield f"{'block moves' if len(moved) == 1 else 'blocks move'}: {', '.join(moved[:_SHOWN])}{more}"
    if before.root != after.root:
        yield f"batch and loss are on device {after.root} instead of {before.root}"
    if before.micro_batches != after.micro_batches:
        yield f"{_counted(after.micro_batches)} instead of {before.micro_batches}"
    if before.schedule != after.schedule:
        yield f"schedule {after.schedule!r} instead of {before.schedule!r}"
    for what, word in (("recompute", "recomputed"), ("offload", "saved on the host")):
        was, now = before.saving.count(what), after.saving.count(what)
        if was != now:
            yield f"{now} blocks are {word} instead of {was}"
    if len(before.streamed) != len(after.streamed):
        yield f"{len(after.streamed)} blocks have their weights on the host instead of {len(before.streamed)}"
    if before.host_optimizer != after.host_optimizer:
        yield f"the optimizer state of {len(after.host_optimizer)} devices is on the host"


def _counted(parts: int) -> str:
    return f"{parts} micro-batch" + ("es" if parts > 1 else "")
