"""A plan: which block lives on which device, what every device will hold, and how good that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autobalance.devices.device import Device
from autobalance.partitioning.stage import Stage
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT
from autobalance.saved import IN_MEMORY, load, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plan:
    """Where every block goes and what the devices will hold.

    Example:
        >>> plan = autobalance.plan(profile, "4x80GiB")
        >>> plan.assignment, plan.peaks
        >>> print(plan)

    Attributes:
        assignment: device index per block, in call order.
        blocks: the profile's row of every block, in call order, for one micro-batch.
        devices: the devices planned for.
        budgets: bytes that each device may hold: capacity less reserve.
        peaks: most bytes at once on each device.
        root: device index of batch, loss and metrics.
        policy: the policy that chose it.
        loose: (name, owner) of modules and tensors outside the blocks; the owner is a block index or `ROOT`.
        step_time: predicted seconds of the forwards and backwards of one step.
        stages: consecutive blocks on one device, in call order.
        saving: for each block what becomes of the tensors it saves for backward: `"keep"`, `"recompute"` or
            `"offload"`; empty where all keep them.
        streamed: blocks whose weights are kept in host memory and brought to the device when they run.
        host_optimizer: devices whose optimizer state is kept in host memory.
        objective: what was minimised, `"step time"` in seconds or `"largest use"`, the largest peak / budget.
        value: of the objective.
        bounds: lower bounds of the objective, from the loosest to the tightest: `"area"`, `"indivisible block"`,
            `"transfers"` and, where it is proved, `"memory"`, which is the least of all plans of the same kind; else
            `"relaxation"`, where a solver found one.
        optimal: True where no plan of the same kind can be better, by proof; with `policy="auto"`, where none is faster
            by more than the 2 % within which the smaller use wins.
        advice: what would make it better.
        micro_batches: parts that a batch is split into.
        schedule: order in which they run: `"naive"`, `"gpipe"`, `"1f1b"` or `"looped"`.
        accumulated: True where micro-batches are whole batches, whose gradients one step adds up (Lightning's
            `accumulate_grad_batches`), not parts of one.
        batch: the batch that the plan covers, in words.
        notes: what a reader should know.
        fingerprint: of the profile it was made from.
        profile: that profile, as long as the plan is in memory; it is not saved.
        question: what the plan was asked for, likewise.
    """

    assignment: tuple[int, ...]
    blocks: tuple[BlockCost, ...]
    devices: tuple[Device, ...]
    budgets: tuple[int, ...]
    peaks: tuple[int, ...]
    root: int
    policy: str
    loose: tuple[tuple[str, int], ...] = ()
    step_time: float = 0.0
    stages: tuple[Stage, ...] = ()
    saving: tuple[str, ...] = ()
    streamed: tuple[int, ...] = ()
    host_optimizer: tuple[int, ...] = ()
    objective: str = "largest use"
    value: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=dict, hash=False)
    optimal: bool = False
    advice: tuple[str, ...] = ()
    micro_batches: int = 1
    schedule: str = "naive"
    accumulated: bool = False
    batch: str = ""
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    profile: Profile | None = field(default=None, compare=False, repr=False, metadata=IN_MEMORY)
    question: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False, metadata=IN_MEMORY)

    def __post_init__(self) -> None:
        count = len(self.devices)
        if len(self.assignment) != len(self.blocks):
            raise ValueError(f"the plan assigns {len(self.assignment)} blocks, but has rows for {len(self.blocks)}")
        if len(self.budgets) != count or len(self.peaks) != count:
            raise ValueError(
                f"the plan has {count} devices, but {len(self.budgets)} budgets and {len(self.peaks)} peaks"
            )
        if any(not 0 <= device < count for device in (*self.assignment, self.root)):
            raise ValueError(f"the plan puts something on a device outside 0 to {count - 1}")
        for name, owner in self.loose:
            if not ROOT <= owner < len(self.blocks):
                raise ValueError(
                    f"{name!r}, which is loose, has the owner {owner}, but there are {len(self.blocks)} blocks"
                )

    @property
    def block_names(self) -> tuple[str, ...]:
        """Block names in call order."""
        return tuple(block.name for block in self.blocks)

    @property
    def loose_map(self) -> dict[str, int]:
        """Device index of every module and tensor outside the blocks, by name.

        Example:
            >>> plan.loose_map
            {'scale': 1}
        """
        return {name: self.root if owner == ROOT else self.assignment[owner] for name, owner in self.loose}

    @property
    def device_map(self) -> dict[str, int]:
        """Device index of every module and tensor by name, as accelerate has it; the parts of a group stand one by one.

        Example:
            >>> plan.device_map
            {'embed': 0, 'layers.0': 0, 'layers.1': 1, 'head': 1}
        """
        places = {
            member: device
            for block, device in zip(self.blocks, self.assignment, strict=True)
            for member in block.members
        }
        return places | self.loose_map

    @property
    def uses(self) -> tuple[float, ...]:
        """Peak / budget of every device."""
        return tuple(relative_use(peak, budget) for peak, budget in zip(self.peaks, self.budgets, strict=True))

    @property
    def gap(self) -> float:
        """How far the objective may lie above the least that is possible, as a share of its tightest bound.

        Example:
            >>> f"{plan.gap:.1%}"
        """
        bound = max(self.bounds.values(), default=0.0)
        return max(0.0, self.value / bound - 1) if bound > 0 else 0.0

    @property
    def fits(self) -> bool:
        """Whether every peak is within its budget."""
        return all(peak <= budget for peak, budget in zip(self.peaks, self.budgets, strict=True))

    def blocks_on(self, device: int) -> tuple[int, ...]:
        """Indices of the blocks on a device, in call order.

        Example:
            >>> plan.blocks_on(0)

        Args:
            device: its index.
        """
        return tuple(block for block, place in enumerate(self.assignment) if place == device)

    def with_peaks(self, peaks: Sequence[int], notes: Sequence[str] = ()) -> Plan:
        """The same plan with other peaks, such as those of a trace with the placement installed.

        Example:
            >>> plan.with_peaks([1024, 2048], notes=["peaks of the installed trace"])

        Args:
            peaks: bytes per device.
            notes: lines to add to the plan's notes.
        """
        return replace(self, peaks=tuple(int(peak) for peak in peaks), notes=(*self.notes, *notes))

    def max_batch(self) -> int:
        """Samples of the largest batch that fits on these devices under the same policy and options, in as many parts.

        Example:
            >>> autobalance.plan(profile, "4x24GiB").max_batch()
            48

        Returns:
            0 where not even one sample fits.

        Raises:
            ValueError: the plan was read from a file, its profile holds for its own batch only, or memory does not
                limit the batch.
        """
        from autobalance.partitioning.largest_batch import largest_batch_of

        return largest_batch_of(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Example:
            >>> plan.save("plan.json")

        Args:
            path: of the file, which is replaced.
        """
        save(path, "plan", self, indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Example:
            >>> plan = Plan.load("plan.json")

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no plan, one of another version, or damaged.
        """
        return load(path, "plan", cls)

    def report(self, path: str | Path, profile: Profile | None = None) -> Path:
        """Write the plan as one page that a browser opens, with pictures of memory and time; it needs no network.

        Example:
            >>> plan.report("plan.html")

        Args:
            path: of the file, which is replaced where it exists.
            profile: that the plan was made from, for the memory over the step; None: the plan's own, where it was made
                in this process.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
            ValueError: the profile is of another model, batch, optimizer or precision.
        """
        from autobalance.report.page import write_page

        return write_page(self, path, profile)

    def plot(self) -> tuple[Figure, Axes]:
        """The memory of every device by what it is for, against its budget, as a matplotlib figure.

        Example:
            >>> fig, ax = plan.plot()
            >>> fig.savefig("plan.png")

        Returns:
            The figure and its axes; no window opens, and pyplot does not know of them.

        Raises:
            ImportError: matplotlib is missing.
        """
        from autobalance.report.figure import plot_plan

        return plot_plan(self)

    def __str__(self) -> str:
        from autobalance.report.plan_table import plan_table
        from autobalance.report.render import render

        return render(plan_table(self))


def relative_use(peak: int, budget: int) -> float:
    """Peak / budget; infinite where something lies on a device that may hold nothing.

    Example:
        >>> relative_use(3, 4)
        0.75

    Args:
        peak: bytes.
        budget: bytes.
    """
    if budget > 0:
        return peak / budget
    return 0.0 if peak == 0 else float("inf")
