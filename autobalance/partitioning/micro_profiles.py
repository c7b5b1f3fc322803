"""The profile of one micro-batch, from that of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autobalance.devices.roofline import Work
from autobalance.profiling.block_cost import BlockCost
from autobalance.profiling.profile import Profile

# Bytes that are read and written for each byte of a sum of two tensors; and of a cast's result of half the size.
_SUM = 3
_CAST = 3


def micro_profile(
    profile: Profile, micro_batches: int, *, schedule: str = "1f1b", accumulated: bool = False
) -> Profile:
    """The profile of the largest of several parts of a batch, or of one of several batches.

    Of what a step does once, or for all micro-batches but the first, each bears its share: autocast makes its casts of
    weights once, and gradients are added to those of the micro-batch before.

    Example:
        >>> micro_profile(profile, 3).batch_size, profile.batch_size
        (3, 8)

    Args:
        profile: of the whole batch, or of the largest of its parts.
        micro_batches: how many there are.
        schedule: in which they run.
        accumulated: whether each is a whole batch, and a step adds up their gradients.

    Raises:
        ValueError: the profile does not know how bytes depend on the batch.
    """
    if micro_batches == 1:
        return profile
    is_of_one = accumulated or profile.part_elements > 0
    if not is_of_one and not profile.batch_size:
        raise ValueError(
            f"micro_batches={micro_batches} needs to know how many samples the batch has and what each takes: make the "
            f"profile with autobalance.profile(..., scalable=True), or Profile.from_costs(..., batch_size=...)"
        )
    part = profile if is_of_one else profile.scaled(-(-profile.batch_size // micro_batches))
    casts, sums = _of_last_step(part, part.timeline.casts), _of_last_step(part, dict(part.timeline.gradients))
    share = (micro_batches - 1) / micro_batches
    rows = (
        _shared(row, casts[block], sums[block], share, is_one_graph=schedule == "gpipe")
        for block, row in enumerate(part.blocks)
    )
    return replace(part, blocks=tuple(rows))


def _of_last_step(profile: Profile, storages: Iterable[int]) -> dict[int, list[int]]:
    """Sizes of those storages that are born in the last step, by block."""
    timeline = profile.timeline
    births, steps = timeline.lives[0], timeline.steps
    start, stop = timeline.window(steps[-1] if steps else None)
    found: dict[int, list[int]] = {block: [] for block in range(len(profile.blocks))}
    for storage in storages:
        if timeline.owners[storage] >= 0 and start <= births[storage] < stop:
            found[timeline.owners[storage]].append(timeline.sizes[storage])
    return found


def _shared(row: BlockCost, casts: list[int], sums: list[int], share: float, is_one_graph: bool) -> BlockCost:
    """A row of one micro-batch, which saves no casts and bears its share of what is done once or not the first time."""
    cast = sum(casts)
    added, launches = sum(sums), len(sums)
    if is_one_graph:
        # One backward adds up the gradients of casts, in their precision, and turns the sum into the weights' once.
        added, launches = max(0, added - 2 * cast), max(0, launches - len(casts))
    return replace(
        row,
        saved=max(0, row.saved - cast),
        forward_work=_with_more(row.forward_work, -share * _CAST * cast, -share * len(casts)),
        backward_work=_with_more(row.backward_work, share * _SUM * added, share * launches),
    )


def _with_more(work: tuple[Work, ...], traffic: float, launches: float) -> tuple[Work, ...]:
    """Work with more, or less, of what does no arithmetic but moves bytes."""
    if not work or not launches:
        return work
    plain = next((part for part in work if not part.flops), Work())
    changed = replace(
        plain,
        traffic=max(0, plain.traffic + round(traffic)),
        launches=max(0, plain.launches + round(launches)),
    )
    return tuple(changed if part is plain else part for part in work) + (() if plain in work else (changed,))
