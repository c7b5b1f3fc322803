"""What the same step costs on a batch of another size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autobalance.profiling.block_cost import between
from autobalance.profiling.holders import Parts
from autobalance.profiling.signature import resized
from autobalance.profiling.timeline import Timeline

if TYPE_CHECKING:
    from autobalance.profiling.profile import Profile


def timeline_at(profile: Profile, batch_size: int | None) -> Timeline:
    """The timeline with the bytes of another batch.

    Example:
        >>> timeline_at(profile, 64).sizes

    Args:
        profile: of one batch.
        batch_size: samples in the other; None: as traced.

    Raises:
        ValueError: the profile does not know how bytes depend on the batch.
    """
    if batch_size is None:
        return profile.timeline
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; a batch has at least one sample")
    if batch_size == profile.batch_size:
        return profile.timeline
    if profile.larger and batch_size > profile.batch_size:
        return profile.larger[0].scaled(batch_size, profile.granule)
    if not profile.is_scalable:
        told = [note for note in profile.notes if "batch" in note]
        raise ValueError(
            f"this profile holds for the batch it was made with ({profile.batch or 'not named'}): how bytes depend on "
            f"the number of samples is not known. Make a profile with a batch of {batch_size} instead."
            + "".join(f" Its notes say: {note}." for note in told)
        )
    return profile.timeline.scaled(batch_size, profile.granule)


def profile_at(profile: Profile, batch_size: int) -> Profile:
    """The profile of the same step on another batch, as `Profile.scaled` gives it.

    Example:
        >>> profile_at(profile, 64).batch_size
        64

    Args:
        profile: of one batch.
        batch_size: samples in the other.

    Raises:
        ValueError: the profile does not know how bytes depend on the batch.
    """
    timeline = timeline_at(profile, batch_size)
    if batch_size == profile.batch_size:
        return profile
    scaled = replace(
        profile,
        timeline=timeline,
        batch=f"{profile.batch}, with {batch_size} samples in place of {profile.batch_size}",
        batch_size=batch_size,
        other_blocks=(),
        holders=(),
        parts=Parts(),
        signature=resized(profile.signature, profile.batch_size, batch_size),
    )
    if profile.other_blocks:
        way = (batch_size - profile.batch_size) / (profile.other_batch_size - profile.batch_size)
        pairs = zip(profile.blocks, profile.other_blocks, strict=True)
        rows = tuple(between(block, other, way) for block, other in pairs)
        scaled = replace(scaled, blocks=rows, other_blocks=profile.blocks, other_batch_size=profile.batch_size)
    return scaled
