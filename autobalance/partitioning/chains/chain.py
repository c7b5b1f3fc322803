"""The chain that is cut: units in call order, and the items that stand beside it.

A unit is a block, or consecutive blocks that must share a device. An item is what need not follow the call order: a
group of far-apart blocks that share a device (tied weights, a module used twice), a pinned block, or the root (batch,
loss, metrics) where a policy or a pin says where it lives. Everything else the root does on the device of the last
block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from autobalance.partitioning.chains.shared_values import EVERYWHERE, NOWHERE
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import HOST, ROOT


@dataclass(frozen=True)
class Item:
    """Something that is placed by itself.

    Attributes:
        owners: block indices, and perhaps `ROOT`.
        device: that it is on; None: any.
    """

    owners: tuple[int, ...]
    device: int | None


@dataclass(frozen=True)
class Chain:
    """Units in call order, the items beside them, and which units are bound to a device.

    Example:
        >>> chain = build_chain(profile, pins={}, root=None, free_pins=False)

    Attributes:
        units: owners (block indices, and `ROOT` with the last block) of each unit.
        items: what stands beside the chain.
        bound: unit -> the device that must hold it.
    """

    units: tuple[tuple[int, ...], ...]
    items: tuple[Item, ...]
    bound: Mapping[int, int]

    def places(self, owners: Sequence[int], here: frozenset[int]) -> list[int]:
        """Place of every storage, by owner, as a stage sees it on whose device the items `here` are.

        Example:
            >>> chain.places(timeline.owners, frozenset())

        Args:
            owners: of the storages.
            here: indices of items.
        """
        place = {owner: unit for unit, members in enumerate(self.units) for owner in members}
        place[HOST] = NOWHERE
        for index, item in enumerate(self.items):
            place.update(dict.fromkeys(item.owners, EVERYWHERE if index in here else NOWHERE))
        return [place[owner] for owner in owners]

    def assignment(
        self, stages: Sequence[tuple[int, int, int]], item_devices: Sequence[int]
    ) -> tuple[tuple[int, ...], int]:
        """Device of every block and of the root, for stages of the chain and devices of the items.

        Example:
            >>> assignment, root = chain.assignment([(0, 0, 2), (1, 2, 4)], ())

        Args:
            stages: (device, first unit, one past the last unit).
            item_devices: device of each item.
        """
        device_of: dict[int, int] = {}
        for device, start, stop in stages:
            for members in self.units[start:stop]:
                device_of.update(dict.fromkeys(members, device))
        for item, device in zip(self.items, item_devices, strict=True):
            device_of.update(dict.fromkeys(item.owners, device))
        root = device_of.pop(ROOT)
        return tuple(device_of[block] for block in range(len(device_of))), root


def build_chain(profile: Profile, pins: Mapping[int, int], root: int | None, *, free_pins: bool) -> Chain:
    """The chain of a profile.

    Example:
        >>> build_chain(profile, pins={3: 0}, root=None, free_pins=False)

    Args:
        profile: what is split.
        pins: block index or `ROOT` -> device.
        root: device of the root where the policy says so; a pin of `ROOT` wins. None: with the last block.
        free_pins: take pinned blocks out of the chain, so that they need not follow the call order.

    Raises:
        ValueError: two pins contradict each other.
    """
    groups = _joined(len(profile.blocks), profile.together)
    root_device = pins.get(ROOT, root)
    units: list[tuple[int, ...]] = []
    items: list[Item] = []
    bound: dict[int, int] = {}
    for group in groups:
        wanted = {pins[block]: block for block in group if block in pins}
        if len(wanted) > 1:
            (here, first), (there, second) = list(wanted.items())[:2]
            raise ValueError(
                f"pin puts {profile.names[first]!r} on device {here} and {profile.names[second]!r} on device {there}, "
                "but they must share a device: they hold the same weights, or one changes the other's tensors in place"
            )
        device = next(iter(wanted), None)
        owners = group
        if root_device is None and group[-1] == len(profile.blocks) - 1:
            owners = (*group, ROOT)
        consecutive = group[-1] - group[0] == len(group) - 1
        if not consecutive or (free_pins and device is not None):
            items.append(Item(owners, device))
        else:
            if device is not None:
                bound[len(units)] = device
            units.append(owners)
    if root_device is not None:
        items.append(Item((ROOT,), root_device))
    return Chain(tuple(units), tuple(items), bound)


def _joined(blocks: int, together: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups of blocks that share a device, ordered by their first block; overlapping groups become one."""
    leader = list(range(blocks))
    for group in together:
        leaders = {leader[block] for block in group}
        leader = [min(leaders) if found in leaders else found for found in leader]
    groups: dict[int, list[int]] = {}
    for block, first in enumerate(leader):
        groups.setdefault(first, []).append(block)
    return [tuple(groups[first]) for first in sorted(groups)]


def resolve_pins(profile: Profile, pin: Mapping[str, int] | None, devices: int) -> dict[int, int]:
    """Block indices (or `ROOT`) that a user's pins mean.

    A loose module or tensor lives with its user, so that pinning it pins the block, or the root, that uses it.

    Example:
        >>> resolve_pins(profile, {"head": 0}, devices=4)

    Args:
        profile: whose names they are.
        pin: as for `plan`.
        devices: how many there are.

    Raises:
        TypeError: no mapping.
        ValueError: a name or a device that does not exist, or two pins of one block that differ.
    """
    if pin is not None and not isinstance(pin, Mapping):
        raise TypeError(f"pin is a mapping such as {{'head': 0}}, from names to positions of devices, not {pin!r}")
    owners: dict[str, int] = {}
    for name, owner in profile.loose:
        owners[name] = owner
    for index, block in enumerate(profile.blocks):
        owners.update(dict.fromkeys((block.name, *block.members), index))
    pins: dict[int, int] = {}
    for name, device in (pin or {}).items():
        if name not in owners:
            raise ValueError(f"pin names {name!r}, which is not a block{_suggestion(name, owners)}")
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < devices:
            raise ValueError(
                f"pin puts {name!r} on device {device!r}; devices are positions in the list of devices, here 0 to "
                f"{devices - 1}"
            )
        owner = owners[name]
        if pins.setdefault(owner, device) != device:
            holder = "the root" if owner == ROOT else repr(profile.names[owner])
            raise ValueError(f"pin puts {name!r} on device {device}, but {holder}, where it lives, on {pins[owner]}")
    return pins


def _suggestion(name: str, known: Mapping[str, int]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(match) for match in close)}?"
    return f"; the blocks are {', '.join(list(known)[:8])}{', ...' if len(known) > 8 else ''}"
