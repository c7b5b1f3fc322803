"""What a timeline and a profile have to be, whoever made them: people edit their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from autobalance.profiling.profile import Profile
    from autobalance.profiling.timeline import Timeline

# What 64-bit integers can still add up.
_MOST = 2**62
# Owners that are no block, as the timeline names them: what is on the root device, and on no device.
_ROOT, _HOST = -1, -2


def check_profile(profile: Profile) -> None:
    """Refuse rows that contradict each other or the timeline.

    Args:
        profile: as made or read.

    Raises:
        ValueError: what is wrong.
    """
    count = len(profile.blocks)
    if not count:
        raise ValueError("a profile needs at least one block")
    names = [block.name for block in profile.blocks]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < count else []
    if twice:
        raise ValueError(f"block names must differ, but these come twice: {', '.join(twice)}")
    for group in profile.together:
        if any(not 0 <= block < count for block in group):
            raise ValueError(f"together={group} names a block that is not among the {count} blocks")
    for name, owner in profile.loose:
        if not _ROOT <= owner < count:
            raise ValueError(f"{name!r}, which is loose, has the owner {owner}, but there are {count} blocks")
    unknown = [block for block in profile.waits if not _ROOT <= block < count]
    if unknown:
        raise ValueError(f"waits={profile.waits} names {unknown}, but there are {count} blocks")
    strays = {owner for owner in profile.timeline.owners if not _HOST <= owner < count}
    if strays:
        raise ValueError(f"the timeline names owners {sorted(strays)}, but there are {count} blocks")
    if profile.batch_size < 0 or profile.granule < 1:
        raise ValueError(
            f"batch_size={profile.batch_size} and granule={profile.granule}: a batch has no negative number of "
            f"samples, and a granule at least one byte"
        )
    if profile.other_blocks and tuple(block.name for block in profile.other_blocks) != profile.names:
        raise ValueError("other_blocks describes the same blocks, but names others")
    if profile.other_blocks and profile.other_batch_size == profile.batch_size:
        raise ValueError(f"other_batch_size={profile.other_batch_size} is batch_size, but rows of another are needed")


def check_timeline(timeline: Timeline) -> None:
    """Refuse storages and events that contradict each other.

    Args:
        timeline: as made or read.

    Raises:
        ValueError: what is wrong, and where.
    """
    count = len(timeline.sizes)
    if len(timeline.owners) != count or len(timeline.values) != count:
        raise ValueError(
            f"sizes, owners and values describe the same storages, but have {count}, {len(timeline.owners)} and "
            f"{len(timeline.values)} entries"
        )
    if min(timeline.sizes, default=0) < 0:
        raise ValueError(f"a storage has {min(timeline.sizes)} bytes; sizes must not be negative")
    if sum(timeline.sizes) > _MOST:
        raise ValueError(f"the storages take {sum(timeline.sizes)} bytes together, more than any machine has")
    if len(timeline.fixed) not in (0, count) or len(timeline.per_sample) not in (0, len(timeline.fixed)):
        raise ValueError(
            f"fixed and per_sample have {len(timeline.fixed)} and {len(timeline.per_sample)} entries; each describes "
            f"all {count} storages, or none"
        )
    for name, named in (("scratch", timeline.scratch), ("casts", timeline.casts)):
        for storage in named:
            if not 0 <= storage < count:
                raise ValueError(f"{name} names storage {storage}, but there are {count} storages")
    if any(not 0 <= index < count or not -1 <= then < count for index, then in timeline.gradients):
        raise ValueError(f"gradients names storages that there are not; there are {count}")
    wholes = timeline.wholes
    if len(wholes) not in (0, count) or any(not -1 <= whole < part for part, whole in enumerate(wholes)):
        raise ValueError("wholes names for every storage an earlier one, or -1, or is empty")
    for call in timeline.calls:
        call.check(count, len(timeline.events))
    for fan in timeline.fans:
        fan.check(count, len(timeline.events))
    _check_events(timeline, count)
    for name, position in timeline.marks:
        if not 0 <= position <= len(timeline.events):
            raise ValueError(f"mark {name!r} is at event {position}, but there are {len(timeline.events)} events")
    if any(not 0 <= position <= len(timeline.events) for position in timeline.emptied):
        raise ValueError(f"emptied={timeline.emptied} speaks of events, but there are {len(timeline.events)}")


def _check_events(timeline: Timeline, count: int) -> None:
    storages, born = timeline.event_columns
    stray = np.flatnonzero((storages < 0) | (storages >= count))
    if len(stray):
        position = int(stray[0])
        raise ValueError(f"event {position} speaks of storage {storages[position]}, but there are {count} storages")
    births, deaths = np.bincount(storages[born], minlength=count), np.bincount(storages[~born], minlength=count)
    if births.max(initial=0) < 2 and deaths.max(initial=0) < 2:
        first, last = timeline.lives
        died = np.flatnonzero(deaths)
        if (first[died] < last[died]).all():
            return
    # Births and deaths of one storage take turns, beginning with a birth.
    order = np.argsort(storages, kind="stable")
    of = storages[order]
    heads = np.flatnonzero(np.r_[True, of[1:] != of[:-1]]) if len(of) else order
    place = np.arange(len(of)) - np.repeat(heads, np.diff(np.r_[heads, len(of)]))
    wrong = order[born[order] != (place % 2 == 0)]
    if len(wrong):
        position = int(wrong.min())
        state = "born while it lives" if born[position] else "dies while it is not alive"
        raise ValueError(f"event {position}: storage {storages[position]} {state}")
