"""The profile of one micro-batch, from that of the whole batch."""

from __future__ import annotations

from dataclasses import replace

from autobalance.profiling.profile import Profile


def micro_profile(profile: Profile, micro_batches: int, *, accumulated: bool = False) -> Profile:
    """The profile of the largest of several parts of a batch, or of one of several batches.

    Example:
        >>> micro_profile(profile, 3).batch_size, profile.batch_size
        (3, 8)

    Args:
        profile: of the whole batch.
        micro_batches: how many there are.
        accumulated: whether each is a whole batch, and a step adds up their gradients.

    Raises:
        ValueError: the profile does not know how bytes depend on the batch.
    """
    if micro_batches == 1:
        return profile
    if accumulated:
        return _with_casts_apart(profile)
    if not profile.batch_size:
        raise ValueError(
            f"micro_batches={micro_batches} needs to know how many samples the batch has and what each takes: make the "
            f"profile with autobalance.profile(..., scalable=True), or Profile.from_costs(..., batch_size=...)"
        )
    return _with_casts_apart(profile.scaled(-(-profile.batch_size // micro_batches)))


def _with_casts_apart(profile: Profile) -> Profile:
    """A profile whose rows save no casts of weights: autocast keeps these once, for all micro-batches."""
    timeline = profile.timeline
    if not timeline.casts:
        return profile
    births, steps = timeline.lives[0], timeline.steps
    start, stop = timeline.window(steps[-1] if steps else None)
    casts = [0] * len(profile.blocks)
    for storage in timeline.casts:
        if timeline.owners[storage] >= 0 and start <= births[storage] < stop:
            casts[timeline.owners[storage]] += timeline.sizes[storage]
    rows = zip(profile.blocks, casts, strict=True)
    return replace(profile, blocks=tuple(replace(row, saved=max(0, row.saved - cast)) for row, cast in rows))
