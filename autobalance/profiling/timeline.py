"""Storage events of a traced step: what every device will hold, instant by instant, under any assignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1
"""Owner of what lives on the root device: batch, loss, metrics."""
HOST = -2
"""Owner of what lives on no device."""
# What 64-bit integers can still add up.
_MOST = 2**62


@dataclass(frozen=True)
class Timeline:
    """Births and deaths of the storages of one or more steps, in order.

    Example:
        >>> Timeline(sizes=(512, 1024), owners=(0, 1), values=(-1, -1), events=(1, 2, -2))

    Attributes:
        sizes: bytes of every storage, as the allocator rounds them.
        owners: block index of every storage, `ROOT` or `HOST`.
        values: storages with the same value of 0 or more hold one tensor: the original and its copies at block doors.
            On one device they are a single storage, as large as the first of them there, alive while any of them is.
            -1: a tensor that nothing else holds.
        events: `s + 1`: storage `s` is born; `-(s + 1)`: it dies. What never dies lives to the end.
        marks: names of instants, as (name, index into `events`): ("step 1 forward", 12).
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    values: tuple[int, ...]
    events: tuple[int, ...]
    marks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        count = len(self.sizes)
        if len(self.owners) != count or len(self.values) != count:
            raise ValueError(
                f"sizes, owners and values describe the same storages, but have {count}, {len(self.owners)} and "
                f"{len(self.values)} entries"
            )
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"a storage has {min(self.sizes)} bytes; sizes must not be negative")
        if sum(self.sizes) > _MOST:
            raise ValueError(f"the storages take {sum(self.sizes)} bytes together, more than any machine has")
        alive = bytearray(count)
        for position, event in enumerate(self.events):
            storage = abs(event) - 1
            if not 0 <= storage < count:
                raise ValueError(f"event {position} speaks of storage {storage}, but there are {count} storages")
            if alive[storage] == (event > 0):
                state = "born while it lives" if event > 0 else "dies while it is not alive"
                raise ValueError(f"event {position}: storage {storage} {state}")
            alive[storage] = event > 0
        for name, position in self.marks:
            if not 0 <= position <= len(self.events):
                raise ValueError(f"mark {name!r} is at event {position}, but there are {len(self.events)} events")

    def peaks(self, homes: Sequence[int], devices: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Most bytes alive at once on each device.

        Example:
            >>> Timeline((512, 1024), (0, 1), (-1, -1), (1, 2, -2)).peaks([0, 1], devices=2)
            [512, 1024]

        Args:
            homes: device of every storage; negative: on none of them.
            devices: how many devices there are.
            start: first event of the window in which the peak is looked for; what lives already counts.
            stop: one past the last event of that window; None: to the end.

        Returns:
            Peak bytes per device.
        """
        used = [0] * devices
        peaks = [0] * devices
        # Per device and shared value: how many of its storages live there, and the bytes that they take together.
        holders: dict[tuple[int, int], tuple[int, int]] = {}
        last = len(self.events) if stop is None else stop
        for position, event in enumerate(self.events[:last]):
            if position == start:
                peaks = used.copy()
            storage = abs(event) - 1
            device = homes[storage]
            if device < 0:
                continue
            size, value = self.sizes[storage], self.values[storage]
            if value >= 0:
                count, taken = holders.get((device, value), (0, size))
                count += 1 if event > 0 else -1
                holders[device, value] = (count, taken)
                if count == 0:
                    del holders[device, value]
                if count != (1 if event > 0 else 0):
                    continue
                size = taken
            if event > 0:
                used[device] += size
                peaks[device] = max(peaks[device], used[device])
            else:
                used[device] -= size
        return peaks if start < last else used

    def window(self, step: int | None) -> tuple[int, int]:
        """First event and one past the last event of a step, from the marks; of everything for None.

        Example:
            >>> timeline.window(2)

        Raises:
            ValueError: no mark speaks of that step.
        """
        if step is None:
            return 0, len(self.events)
        starts = [position for name, position in self.marks if name.split()[:2] == ["step", str(step)]]
        if not starts:
            known = ", ".join(name for name, _ in self.marks) or "none"
            raise ValueError(f"the profile has no step {step}; its marks are: {known}")
        first = min(starts)
        later = [
            position
            for name, position in self.marks
            if position >= first and name.startswith("step ") and name.split()[1] != str(step)
        ]
        return first, min(later, default=len(self.events))
