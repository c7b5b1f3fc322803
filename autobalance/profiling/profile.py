"""A profile: what every block costs, in call order, as frozen data that can be saved and read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autobalance.profiling.timeline import HOST, ROOT, Timeline
from autobalance.saved import load, save


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
        forward_time, backward_time: seconds.
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

    @property
    def names(self) -> tuple[str, ...]:
        """Block names in call order."""
        return tuple(block.name for block in self.blocks)

    def peak(self, step: int | None = None) -> int:
        """Bytes at the highest instant if everything sat on one device.

        Example:
            >>> profile.peak(step=2)

        Args:
            step: counted from 1; None: the highest of all traced steps.

        Raises:
            ValueError: the trace has no such step.
        """
        start, stop = self.timeline.window(step)
        homes = [-1 if owner == HOST else 0 for owner in self.timeline.owners]
        return self.timeline.peaks(homes, 1, start, stop)[0]

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
