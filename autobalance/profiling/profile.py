"""A profile: what every block costs, in call order, as frozen data that can be saved and read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from autobalance.allocator.replay import replay_requests, requests_fit
from autobalance.allocator.settings import AllocatorSettings, settings_from_environment
from autobalance.profiling.holders import Holder, Parts
from autobalance.profiling.roofline import Work
from autobalance.profiling.timeline import HOST, ROOT, Phase, Timeline
from autobalance.saved import load, save
from autobalance.units import parse_size


@dataclass(frozen=True)
class BlockCost:
    """What one block costs: bytes of memory and seconds.

    Example:
        >>> BlockCost("layers.0", kind="Linear", weights=4096)

    Attributes:
        name: qualified name in the root module; a group of modules is joined with `+`.
        kind: class name.
        weights, gradients, optimizer, buffers: static bytes.
        inputs, outputs: bytes of the tensors that go in and come out.
        saved: bytes kept from forward to backward.
        forward_transient, backward_transient: most bytes alive only inside one forward or backward.
        forward_time, backward_time: seconds; running the forward again in the backward takes `forward_time` once more.
        optimizer_time: seconds of its share of an optimizer step.
        forward_work, backward_work: operations and bytes moved, from which the time on any device follows.
        dtype: data type of most of its weights.
    """

    name: str
    kind: str = ""
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    inputs: int = 0
    outputs: int = 0
    saved: int = 0
    forward_transient: int = 0
    backward_transient: int = 0
    forward_time: float = 0.0
    backward_time: float = 0.0
    optimizer_time: float = 0.0
    forward_work: tuple[Work, ...] = ()
    backward_work: tuple[Work, ...] = ()
    dtype: str = ""

    @property
    def static(self) -> int:
        """Bytes that stay: weights, gradients, optimizer state and buffers."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the modules that the block is made of."""
        return tuple(self.name.split("+"))


@dataclass(frozen=True)
class Profile:
    """What a model costs, block by block in call order, with the storage events behind it.

    Example:
        >>> profile = Profile.from_costs(static=[4, 4, 4], saved=[1, 1, 1])
        >>> profile.peak()
        15

    Attributes:
        blocks: one row for each block, in call order.
        timeline: storage events of the traced steps.
        together: groups of block indices that must share a device.
        loose: (qualified name, owner) of every module or tensor outside the blocks; the owner is a block index or
            `ROOT`.
        batch: the batch that the profile covers, in words.
        target: whose kernels it stands for: `"cuda"`, a GPU's name, `"cpu"`, `"simulated"`.
        training: False for a forward pass alone.
        precision: as Lightning names it: `"32-true"`, `"bf16-mixed"`.
        optimizers: class names.
        notes: what a reader should know: placeholders, fall-backs.
        batch_size: samples in the batch that was traced; 0: not known.
        granule: bytes to whose multiples the device rounds storages up.
        holders: what holds the most at the peak, the largest first.
        parts: how certain the bytes at the peak are.
        other_blocks, other_batch_size: the rows at another batch size, from which `scaled` interpolates rows.
    """

    blocks: tuple[BlockCost, ...]
    timeline: Timeline
    together: tuple[tuple[int, ...], ...] = ()
    loose: tuple[tuple[str, int], ...] = ()
    batch: str = ""
    target: str = ""
    training: bool = True
    precision: str = "32-true"
    optimizers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    batch_size: int = 0
    granule: int = 512
    other_blocks: tuple[BlockCost, ...] = ()
    other_batch_size: int = 0
    holders: tuple[Holder, ...] = ()
    parts: Parts = Parts()

    def __post_init__(self) -> None:
        count = len(self.blocks)
        if not count:
            raise ValueError("a profile needs at least one block")
        names = [block.name for block in self.blocks]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < count else []
        if twice:
            raise ValueError(f"block names must differ, but these come twice: {', '.join(twice)}")
        for group in self.together:
            if any(not 0 <= block < count for block in group):
                raise ValueError(f"together={group} names a block that is not among the {count} blocks")
        for name, owner in self.loose:
            if not ROOT <= owner < count:
                raise ValueError(f"{name!r}, which is loose, has the owner {owner}, but there are {count} blocks")
        strays = {owner for owner in self.timeline.owners if not HOST <= owner < count}
        if strays:
            raise ValueError(f"the timeline names owners {sorted(strays)}, but there are {count} blocks")
        if self.batch_size < 0 or self.granule < 1:
            raise ValueError(
                f"batch_size={self.batch_size} and granule={self.granule}: a batch has no negative number of samples, "
                f"and a granule at least one byte"
            )
        if self.other_blocks and tuple(block.name for block in self.other_blocks) != self.names:
            raise ValueError("other_blocks describes the same blocks, but names others")
        if self.other_blocks and self.other_batch_size == self.batch_size:
            raise ValueError(f"other_batch_size={self.other_batch_size} is batch_size, but rows of another are needed")

    @property
    def names(self) -> tuple[str, ...]:
        """Block names in call order."""
        return tuple(block.name for block in self.blocks)

    def peak(
        self,
        step: int | None = None,
        *,
        phase: Phase | None = None,
        reserved: bool = False,
        batch_size: int | None = None,
        settings: AllocatorSettings | None = None,
    ) -> int:
        """Bytes at the highest instant if everything sat on one device.

        Example:
            >>> profile.peak(step=2)
            >>> profile.peak(phase="optimizer", batch_size=64)

        Args:
            step: counted from 1; steps after the last that was traced are like that one. None: the highest of all.
            phase: `"forward+backward"` or `"optimizer"`; None: both.
            reserved: bytes that CUDA's caching allocator has taken from the device by then, instead of bytes in use.
            batch_size: samples in a batch; None: as traced.
            settings: of that allocator; None: those of `PYTORCH_CUDA_ALLOC_CONF` in the environment.

        Raises:
            ValueError: the trace has no such step or phase, does not know how bytes depend on the batch, or is of a
                device without a caching allocator.
        """
        timeline = self._timeline_of(batch_size)
        if step is not None and timeline.steps and step > timeline.steps[-1]:
            step = timeline.steps[-1]
        spans = [timeline.window(step)] if phase is None else timeline.spans(step, phase)
        if reserved:
            requests = self._requests(timeline, max(stop for _, stop in spans))
            return replay_requests(requests, settings=_settings(settings)).reserved
        return max(timeline.peaks(_on_one_device(timeline), 1, start, stop)[0] for start, stop in spans)

    def fits(
        self, capacity: str | float, *, batch_size: int | None = None, settings: AllocatorSettings | None = None
    ) -> bool:
        """Whether a device with so much memory for the allocator could run all traced steps by itself.

        The replay decides: reserved bytes above the capacity are given back where they are cached, and free memory that
        lies in pieces can be too little.

        Example:
            >>> profile.fits("23.5 GiB")

        Args:
            capacity: bytes, or words, that the allocator can take: what is free once the CUDA context is there.
            batch_size: samples in a batch; None: as traced.
            settings: as for `peak`.

        Raises:
            ValueError: as for `peak`.
        """
        timeline = self._timeline_of(batch_size)
        return requests_fit(self._requests(timeline, None), parse_size(capacity), _settings(settings))

    def scaled(self, batch_size: int) -> Profile:
        """The profile of the same step on a batch of another size.

        Bytes of storages, and so all peaks, are those that a trace at that size would find. Rows of blocks lie on a
        line through the two sizes that were traced, which rounding can bend by a granule for each of their storages.

        Example:
            >>> autobalance.plan(profile.scaled(64), "4x24GiB")     # doctest: +SKIP

        Args:
            batch_size: samples in a batch.

        Raises:
            ValueError: the profile does not know how bytes depend on the batch.
        """
        timeline = self._timeline_of(batch_size)
        if batch_size == self.batch_size:
            return self
        batch = f"{self.batch}, with {batch_size} samples in place of {self.batch_size}"
        scaled = replace(
            self, timeline=timeline, batch=batch, batch_size=batch_size, other_blocks=(), holders=(), parts=Parts()
        )
        if self.other_blocks:
            way = (batch_size - self.batch_size) / (self.other_batch_size - self.batch_size)
            pairs = zip(self.blocks, self.other_blocks, strict=True)
            rows = tuple(_between(block, other, way) for block, other in pairs)
            scaled = replace(scaled, blocks=rows, other_blocks=self.blocks, other_batch_size=self.batch_size)
        return scaled

    def _requests(self, timeline: Timeline, stop: int | None) -> list[tuple[int, int]]:
        if self.granule == 1:
            raise ValueError(
                f"the profile is of {self.target!r}, which has no caching allocator that reserves memory; ask for "
                f"peak() without reserved=True, or make the profile with target='cuda'"
            )
        return timeline.requests(_on_one_device(timeline), 1, stop)[0]

    def _timeline_of(self, batch_size: int | None) -> Timeline:
        if batch_size is None:
            return self.timeline
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; a batch has at least one sample")
        if batch_size == self.batch_size:
            return self.timeline
        if not self.batch_size or len(self.timeline.per_sample) != len(self.timeline.sizes):
            told = [note for note in self.notes if "batch" in note]
            raise ValueError(
                f"this profile holds for the batch it was made with ({self.batch or 'not named'}): how bytes depend on "
                f"the number of samples is not known. Make a profile with a batch of {batch_size} instead."
                + "".join(f" Its notes say: {note}." for note in told)
            )
        return self.timeline.scaled(batch_size, self.granule)

    @classmethod
    def from_costs(
        cls,
        static: Sequence[float],
        saved: Sequence[float] | None = None,
        transient: Sequence[float] | None = None,
        forward_time: Sequence[float] | None = None,
        backward_time: Sequence[float] | None = None,
        transfer: Sequence[float] | None = None,
        *,
        names: Sequence[str] | None = None,
        together: Sequence[Sequence[int]] = (),
    ) -> Profile:
        """Make a profile by hand, for a what-if or a test.

        Its timeline is the textbook's: static bytes first; forward of each block in order, its transient bytes up and
        down and its saved bytes kept; then backward in reverse order, transient bytes up and down, saved bytes freed.

        Example:
            >>> Profile.from_costs(static=[4, 4], saved=[2, 1], transient=[3, 3])

        Args:
            static: bytes that stay for each block, in call order.
            saved: bytes kept from forward to backward; default 0.
            transient: bytes alive only inside a forward or a backward; default 0.
            forward_time: seconds; default 0.
            backward_time: seconds; default 0.
            transfer: bytes that leave each block for the next one; the last may be left out. Default 0.
            names: block names; default `block0`, `block1`, ...
            together: groups of block indices that must share a device.

        Returns:
            A profile of `len(static)` blocks.

        Raises:
            ValueError: lists of different lengths, or a number that is negative or not finite.
        """
        count = len(static)
        if transfer is not None and len(transfer) == count - 1:
            transfer = [*transfer, 0]
        columns = {
            "static": static,
            "saved": saved,
            "transient": transient,
            "forward_time": forward_time,
            "backward_time": backward_time,
            "transfer": transfer,
        }
        column = {what: _column(what, given, count) for what, given in columns.items()}
        if names is not None and len(names) != count:
            raise ValueError(f"names has {len(names)} entries, static has {count}; they describe the same blocks")
        sizes = {what: [_whole(size) for size in column[what]] for what in ("static", "saved", "transient", "transfer")}
        blocks = tuple(
            BlockCost(
                names[k] if names is not None else f"block{k}",
                weights=sizes["static"][k],
                inputs=sizes["transfer"][k - 1] if k else 0,
                outputs=sizes["transfer"][k],
                saved=sizes["saved"][k],
                forward_transient=sizes["transient"][k],
                backward_transient=sizes["transient"][k],
                forward_time=float(column["forward_time"][k]),
                backward_time=float(column["backward_time"][k]),
            )
            for k in range(count)
        )
        return cls(
            blocks,
            _textbook_timeline(sizes["static"], sizes["saved"], sizes["transient"]),
            together=tuple(tuple(group) for group in together),
            batch="as given",
            target="by hand",
        )

    def report(self) -> str:
        """The profile as a table, with its peaks, how certain they are, and what holds most of them, in words.

        Example:
            >>> print(profile.report())
        """
        from autobalance.report.render import render
        from autobalance.report.tables import profile_table

        return render(profile_table(self))

    def __str__(self) -> str:
        return self.report()

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON.

        Example:
            >>> profile.save("profile.json")
        """
        save(path, "profile", self)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Example:
            >>> profile = Profile.load("profile.json")

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no profile, one of another version, or damaged.
        """
        return load(path, "profile", cls)


def require_profile(thing: object, function: str) -> None:
    """Refuse what is no profile.

    Example:
        >>> require_profile(profile, "plan")

    Raises:
        TypeError: it is something else, such as the model itself.
    """
    if not isinstance(thing, Profile):
        raise TypeError(
            f"{function} takes a Profile, not a {type(thing).__name__}; make one with autobalance.profile(model, batch)"
        )


def _on_one_device(timeline: Timeline) -> list[int]:
    return [-1 if owner == HOST else 0 for owner in timeline.owners]


def _settings(given: AllocatorSettings | None) -> AllocatorSettings:
    return settings_from_environment() if given is None else given


def _between(block: BlockCost, other: BlockCost, way: float) -> BlockCost:
    """The row that lies `way` of the way from one to another, beyond it where `way` is above 1."""
    numbers: dict[str, Any] = {}
    for column in fields(BlockCost):
        here, there = getattr(block, column.name), getattr(other, column.name)
        if isinstance(here, int):
            numbers[column.name] = max(0, round(here + way * (there - here)))
        elif isinstance(here, float):
            numbers[column.name] = max(0.0, here + way * (there - here))
    for work in ("forward_work", "backward_work"):
        numbers[work] = _work_between(getattr(block, work), getattr(other, work), way)
    return replace(block, **numbers)


def _work_between(parts: tuple[Work, ...], others: tuple[Work, ...], way: float) -> tuple[Work, ...]:
    def weigh(part: Work, other: Work, way: float) -> Work:
        pairs = ((part.flops, other.flops), (part.traffic, other.traffic), (part.launches, other.launches))
        return Work(part.arithmetic, *(max(0, round(here + way * (there - here))) for here, there in pairs))

    if [part.arithmetic for part in parts] == [other.arithmetic for other in others]:
        return tuple(weigh(part, other, way) for part, other in zip(parts, others, strict=True))
    # Intensities fell into other classes there: all parts grow as their sum does.
    here, there = sum(part.flops for part in parts), sum(part.flops for part in others)
    growth = 1 + way * (there - here) / here if here else 1.0
    return tuple(weigh(part, Work(part.arithmetic), 1 - growth) for part in parts)


def _column(what: str, given: Sequence[float] | None, count: int) -> Sequence[float]:
    if given is None:
        return [0] * count
    if len(given) != count:
        raise ValueError(f"{what} has {len(given)} entries, static has {count}; they describe the same blocks")
    wrong = [number for number in given if not 0 <= number < math.inf]
    if wrong:
        raise ValueError(f"{what} has the entry {wrong[0]}; costs are finite and not negative")
    return given


def _whole(size: float) -> int:
    return -int(-size // 1)


def _textbook_timeline(static: Sequence[int], saved: Sequence[int], transient: Sequence[int]) -> Timeline:
    count = len(static)
    # Storages: static of every block, then saved of every block, then transient of every block.
    births = [k + 1 for k in range(count)]
    forward: list[int] = []
    backward: list[int] = []
    for k in range(count):
        keep, work = count + k + 1, 2 * count + k + 1
        forward += [work, -work, keep]
    for k in reversed(range(count)):
        keep, work = count + k + 1, 2 * count + k + 1
        backward += [work, -work, -keep]
    return Timeline(
        sizes=(*static, *saved, *transient),
        owners=tuple(range(count)) * 3,
        values=(-1,) * (3 * count),
        events=(*births, *forward, *backward),
        marks=(("step 1 forward", count), ("step 1 backward", count + len(forward))),
    )
