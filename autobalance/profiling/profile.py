"""A profile: what every block costs, in call order, as frozen data that can be saved and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autobalance.allocator.replay import replay_requests, requests_fit
from autobalance.allocator.settings import AllocatorSettings, settings_from_environment
from autobalance.profiling.block_cost import BlockCost
from autobalance.profiling.checks import check_profile
from autobalance.profiling.fingerprint import fingerprint_of
from autobalance.profiling.holders import Holder, Parts
from autobalance.profiling.other_batches import profile_at, timeline_at
from autobalance.profiling.textbook import COLUMNS, textbook
from autobalance.profiling.timeline import Phase, Timeline, Whole
from autobalance.saved import load, save
from autobalance.timelines.meeting import as_met
from autobalance.units import parse_size

__all__ = ["BlockCost", "Profile"]

BY_HAND = "by hand"
"""Target of a profile whose costs were given, not traced."""


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
        larger: the timeline of larger batches, where they take another way through the step than this one.
        signature: names, types and shapes of the tensors of every batch that was traced.
        other_blocks, other_batch_size: the rows at another batch size, from which `scaled` interpolates rows.
        part_elements: elements of the part of a batch that was traced, where parts have no number of samples that
            could be scaled, and the profile is that of the largest; 0: the batch was traced as a whole.
        waits: blocks in whose forward, or after it, the host waits for a device; `ROOT`: before the first.
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
    parts: Parts = field(default_factory=Parts)
    larger: tuple[Timeline, ...] = ()
    signature: str = ""
    waits: tuple[int, ...] = ()
    part_elements: int = 0

    def __post_init__(self) -> None:
        check_profile(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Block names in call order."""
        return tuple(block.name for block in self.blocks)

    @property
    def is_scalable(self) -> bool:
        """Whether bytes are known as a function of the batch, so that parts of the batch can be planned.

        Example:
            >>> Profile.from_costs([4, 4], [1, 1], batch_size=8).is_scalable
            True
        """
        return self.batch_size > 0 and len(self.timeline.per_sample) == len(self.timeline.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Short text that differs where the model's structure, the batch, the optimizer or the precision do.

        Example:
            >>> profile.fingerprint == plan.fingerprint
        """
        return fingerprint_of(self)

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
        timeline, homes = self._on_one_device(batch_size)
        if step is not None and timeline.steps and step > timeline.steps[-1]:
            step = timeline.steps[-1]
        spans = [timeline.window(step)] if phase is None else timeline.spans(step, phase)
        if reserved:
            requests = self._requests(timeline, homes, max(stop for _, stop in spans))
            return replay_requests(requests, settings=_settings(settings)).reserved
        return max(timeline.peaks(homes, 1, start, stop)[0] for start, stop in spans)

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
        requests = self._requests(*self._on_one_device(batch_size), None)
        return requests_fit(requests, parse_size(capacity), _settings(settings))

    def scaled(self, batch_size: int) -> Profile:
        """The profile of the same step on a batch of another size.

        Bytes of storages, and so all peaks, are those that a trace at that size would find. Rows of blocks lie on a
        line through the two sizes that were traced, which rounding can bend by a granule for each of their storages.
        Only a batch of one can differ, where tensors of one sample are laid out so that torch copies less.

        Example:
            >>> autobalance.plan(profile.scaled(64), "4x24GiB")     # doctest: +SKIP

        Args:
            batch_size: samples in a batch.

        Raises:
            ValueError: the profile does not know how bytes depend on the batch.
        """
        return profile_at(self, batch_size)

    def _on_one_device(self, batch_size: int | None) -> tuple[Timeline, Whole]:
        timeline = timeline_at(self, batch_size)
        return as_met(timeline, timeline.homes([0] * len(self.blocks), root=0))

    def _requests(self, timeline: Timeline, homes: Whole, stop: int | None) -> list[tuple[int, int]]:
        if self.granule == 1:
            raise ValueError(
                f"the profile is of {self.target!r}, which has no caching allocator that reserves memory; ask for "
                f"peak() without reserved=True, or make the profile with target='cuda'"
            )
        return timeline.requests(homes, 1, stop)[0]

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
        batch_size: int = 0,
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
            batch_size: samples that the costs are for; saved, transient and transferred bytes and times are
                proportional to them. 0: not known, so that the batch cannot be split.

        Returns:
            A profile of `len(static)` blocks.

        Raises:
            ValueError: lists of different lengths, or a number that is negative or not finite.
        """
        columns = (static, saved, transient, forward_time, backward_time, transfer)
        given = dict(zip(COLUMNS, columns, strict=True))
        blocks, timeline = textbook(given, names, batch_size)
        twice = {
            what: column if what == "static" or column is None else [2 * cost for cost in column]
            for what, column in given.items()
        }
        return cls(
            blocks,
            timeline,
            together=tuple(tuple(group) for group in together),
            batch="as given",
            target=BY_HAND,
            # Bytes of a part of the batch are proportional, not rounded up.
            granule=1 if batch_size else 512,
            batch_size=batch_size,
            other_blocks=textbook(twice, names)[0] if batch_size else (),
            other_batch_size=2 * batch_size,
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

        Args:
            path: of the file, which is replaced.
        """
        save(path, "profile", self)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Example:
            >>> profile = Profile.load("profile.json")

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no profile, one of another version, or damaged.
        """
        return load(path, "profile", cls)


def _settings(given: AllocatorSettings | None) -> AllocatorSettings:
    return settings_from_environment() if given is None else given
