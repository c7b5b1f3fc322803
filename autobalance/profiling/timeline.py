"""Storage events of a traced step: what every device will hold, instant by instant, under any assignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autobalance.profiling.checks import check_timeline
from autobalance.saved import PACKED
from autobalance.timelines.calls import Call
from autobalance.timelines.fans import Fan

ROOT = -1
"""Owner of what lives on the root device: batch, loss, metrics."""
HOST = -2
"""Owner of what lives on no device."""
Phase = Literal["forward+backward", "optimizer"]

Whole = NDArray[np.int64]


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
        fixed, per_sample: a batch of `b` samples takes exactly `fixed + per_sample * b` bytes of a storage, before
            rounding. `per_sample` is empty where that is not known; `fixed` then has the exact bytes as traced.
        scratch: indices of storages that are no tensors, but taken by kernels for themselves: scratch and workspaces.
        wholes: for every storage that is a copy of a part of an earlier one the index of that one, else -1; empty where
            no part is copied. On the device of the whole nothing is copied: the part keeps the whole alive.
        emptied: indices into `events` before which all devices give cached memory back (`torch.cuda.empty_cache`).
        fans: tensors that went to several blocks, and how their gradients met.
        gradients: for gradients of parameters the storage, and that which is born next once autograd has added the
            gradient to what was there before; -1: none is.
        casts: indices of storages that are casts of weights, which autocast keeps until its context ends.
        calls: forwards of blocks and when they came back; what is not known to be one is kept whole.
    """

    sizes: tuple[int, ...] = field(metadata=PACKED)
    owners: tuple[int, ...] = field(metadata=PACKED)
    values: tuple[int, ...] = field(metadata=PACKED)
    events: tuple[int, ...] = field(metadata=PACKED)
    marks: tuple[tuple[str, int], ...] = ()
    fixed: tuple[int, ...] = field(default=(), metadata=PACKED)
    per_sample: tuple[int, ...] = field(default=(), metadata=PACKED)
    scratch: tuple[int, ...] = field(default=(), metadata=PACKED)
    wholes: tuple[int, ...] = field(default=(), metadata=PACKED)
    emptied: tuple[int, ...] = ()
    fans: tuple[Fan, ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    casts: tuple[int, ...] = field(default=(), metadata=PACKED)
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        check_timeline(self)

    def homes(self, device_of: Sequence[int], root: int) -> Whole:
        """Device of every storage, -1 for what lives on none.

        Example:
            >>> Timeline((4, 4, 4), (0, ROOT, HOST), (-1,) * 3, ()).homes([1], root=0).tolist()
            [1, 0, -1]

        Args:
            device_of: device index per block.
            root: device index of what the blocks do not own.
        """
        homes: Whole = np.array([-1, root, *device_of], dtype=np.int64)[self.owner_column - HOST]
        return homes

    def peaks(self, homes: Sequence[int] | Whole, devices: int, start: int = 0, stop: int | None = None) -> list[int]:
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
        last = len(self.events) if stop is None else min(stop, len(self.events))
        places, changes, _ = self._changes(homes, last)
        peaks = []
        for device in range(devices):
            here = np.flatnonzero(places == device)
            used = np.cumsum(changes[here])
            first = int(np.searchsorted(here, start))
            already = int(used[first - 1]) if first else 0
            peaks.append(max(already, int(used[first:].max(initial=0))))
        return peaks

    def usage(self, homes: Sequence[int] | Whole, devices: int) -> list[tuple[Whole, Whole]]:
        """Bytes alive on each device over time.

        Example:
            >>> Timeline((512, 1024), (0, 1), (-1, -1), (1, 2, -2)).usage([0, 1], devices=2)[1]
            (array([1, 2]), array([1024,    0]))

        Args:
            homes: device of every storage; negative: on none of them.
            devices: how many devices there are.

        Returns:
            For each device the events that change what is alive there, and the bytes after each of them.
        """
        places, changes, _ = self._changes(homes, len(self.events))
        touched = [np.flatnonzero((places == device) & (changes != 0)) for device in range(devices)]
        return [(here, np.cumsum(changes[here])) for here in touched]

    def requests(
        self, homes: Sequence[int] | Whole, devices: int, stop: int | None = None
    ) -> list[list[tuple[int, int]]]:
        """What each device is asked for: (storage, bytes), more than 0 where it is born and less where it dies.

        Storages that are one on a device appear there as the first of them. 0 bytes: it gives cached memory back.

        Example:
            >>> Timeline((512, 1024), (0, 1), (-1, -1), (1, 2, -2)).requests([0, 0], devices=1)
            [[(0, 512), (1, 1024), (1, -1024)]]

        Args:
            homes: device of every storage; negative: on none of them.
            devices: how many devices there are.
            stop: one past the last event; None: to the end.
        """
        last = len(self.events) if stop is None else min(stop, len(self.events))
        places, changes, keys = self._changes(homes, last)
        found = []
        for device in range(devices):
            here = np.flatnonzero((places == device) & (changes != 0))
            asked = list(zip(keys[here].tolist(), changes[here].tolist(), strict=True))
            before = np.searchsorted(here, [position for position in self.emptied if position <= last])
            for position in before[::-1].tolist():
                asked.insert(position, (-1, 0))
            found.append(asked)
        return found

    def _changes(self, homes: Sequence[int] | Whole, last: int) -> tuple[Whole, Whole, Whole]:
        """Of the first `last` events: on which device, the change of bytes there, and of which storage."""
        sizes, values = self._columns[0], self._held_with(homes)
        storages, born = self.event_columns[0][:last], self.event_columns[1][:last]
        devices = np.asarray(homes, dtype=np.int64)[storages]
        changes, keys = np.where(born, sizes[storages], -sizes[storages]), storages.copy()
        shared = np.flatnonzero((values[storages] >= 0) & (devices >= 0))
        if not len(shared):
            return devices, changes, keys
        # Of one tensor on one device only the first birth and the last death change anything.
        order = shared[np.lexsort((values[storages[shared]], devices[shared]))]
        on, of = devices[order], values[storages[order]]
        steps = np.where(born[order], 1, -1)
        # Every group of equal (device, value) begins with nobody; what earlier groups leave alive is taken off.
        heads = np.flatnonzero(np.r_[True, (on[1:] != on[:-1]) | (of[1:] != of[:-1])])
        total = np.cumsum(steps)
        holders = total - np.repeat(total[heads] - steps[heads], np.diff(np.r_[heads, len(order)]))
        first = (holders == 1) & (steps > 0)
        holder = storages[order][np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
        changes[order] = np.where(first, sizes[holder], np.where(holders == 0, -sizes[holder], 0))
        keys[order] = holder
        return devices, changes, keys

    def _held_with(self, homes: Sequence[int] | Whole) -> Whole:
        """Values of the storages where copies of parts are views, because they are at home with the whole."""
        if not self._parts:
            return self._columns[1]
        values: Whole = self._columns[1].copy()
        fresh = int(values.max(initial=0)) + 1
        for part in self._parts:
            whole = self.wholes[part]
            if homes[part] == homes[whole]:
                if values[whole] < 0:
                    values[whole] = fresh + whole
                values[part] = values[whole]
        return values

    @cached_property
    def _parts(self) -> list[int]:
        return [part for part, whole in enumerate(self.wholes) if whole >= 0]

    @cached_property
    def event_columns(self) -> tuple[Whole, NDArray[np.bool_]]:
        """Storage of each event, and whether it is born."""
        events = np.array(self.events, dtype=np.int64)
        return np.abs(events) - 1, events > 0

    @cached_property
    def lives(self) -> tuple[Whole, Whole]:
        """At which event each storage is born first, and at which it dies last: one past all others for never."""
        storages, born = self.event_columns
        births: Whole = np.full(len(self.sizes), len(self.events), dtype=np.int64)
        deaths = births.copy()
        first = np.flatnonzero(born)[::-1]
        births[storages[first]] = first
        last = np.flatnonzero(~born)
        deaths[storages[last]] = last
        return births, deaths

    @cached_property
    def _columns(self) -> tuple[Whole, Whole]:
        """Sizes and values."""
        return np.array(self.sizes, dtype=np.int64), np.array(self.values, dtype=np.int64)

    @cached_property
    def owner_column(self) -> Whole:
        """Owners."""
        return np.array(self.owners, dtype=np.int64)

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the traced steps."""
        words = (name.split() for name, _ in self.marks)
        return tuple(
            sorted({int(word[1]) for word in words if word[0] == "step" and word[1:2] and word[1].isdecimal()})
        )

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

    def spans(self, step: int | None, phase: Phase) -> list[tuple[int, int]]:
        """The stretches of events that belong to one phase of a step, or of all steps for None.

        Example:
            >>> timeline.spans(2, "optimizer")

        Raises:
            ValueError: no mark speaks of that step or phase.
        """
        if phase not in ("forward+backward", "optimizer"):
            raise ValueError(f"phase={phase!r} does not exist; choose 'forward+backward' or 'optimizer'")
        first, last = self.window(step)
        ends = [*(position for _, position in self.marks[1:]), len(self.events)]
        found = []
        for (name, start), stop in zip(self.marks, ends, strict=False):
            wanted = ("optimizer",) if phase == "optimizer" else ("forward", "backward")
            if first <= start < last and name.startswith("step ") and name.split()[-1] in wanted:
                found.append((start, min(stop, last)))
        if not found:
            of = "the trace" if step is None else f"step {step}"
            known = ", ".join(name for name, _ in self.marks) or "none"
            raise ValueError(f"{of} has no phase {phase!r}; the marks of the profile are: {known}")
        return found

    def scaled(self, batch_size: int, granule: int) -> Timeline:
        """The same events with the bytes that another batch takes.

        Example:
            >>> timeline.scaled(64, granule=512)

        Args:
            batch_size: samples.
            granule: bytes to whose multiples storages are rounded up.

        Raises:
            ValueError: it is not known how bytes depend on the batch.
        """
        if len(self.per_sample) != len(self.sizes):
            raise ValueError("the timeline does not know its bytes as a function of the batch")
        exact = (fixed + each * batch_size for fixed, each in zip(self.fixed, self.per_sample, strict=True))
        return replace(self, sizes=tuple(-(-max(0, nbytes) // granule) * granule for nbytes in exact))
