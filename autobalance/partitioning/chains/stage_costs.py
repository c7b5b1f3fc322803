"""What stages of a chain cost on the devices of a question: the makings of the search's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from autobalance.devices.device import Device
from autobalance.partitioning.chains.arrivals import Arrivals
from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind, kinds_for
from autobalance.partitioning.chains.reach import Growth, growth_of
from autobalance.partitioning.chains.shared_values import Matrix
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.chains.stage_peaks import Reach
from autobalance.partitioning.chains.tables import InFlight, Tables, in_flight_of
from autobalance.partitioning.savings.host_optimizer import host_optimizer, sharing_of
from autobalance.partitioning.savings.saver import Allowed, HostSteps, Saver, unit_costs
from autobalance.partitioning.savings.saving_tables import SavingTables
from autobalance.partitioning.savings.savings import SavingCosts, saving_costs
from autobalance.partitioning.times import device_seconds, launch_seconds
from autobalance.partitioning.transfers import Crossing
from autobalance.partitioning.work_table import Seconds
from autobalance.profiling.profile import Profile
from autobalance.timelines.host_storages import tells_optimizer, with_host


@dataclass
class StageCosts:
    """A chain of one micro-batch on the devices of a question.

    Example:
        >>> StageCosts(profile, chain, devices, budgets=(11, 11)).unit_peaks()

    Attributes:
        profile: of one micro-batch.
        chain: units and items.
        devices: of the question.
        budgets: bytes per device.
        excess: bytes by which each device, where it holds something, is known to stand above the replay.
        schedule: order of the micro-batches.
        micro_batches: how many there are.
        crossings: tensors that go from block to block.
        allowed: what blocks may do to save memory; None: nothing.
        is_cautious: whether devices that are visited twice are taken to wait; where their visits follow one another,
            they do not.
        limit: seconds of a step within which the lightest way is wanted; None: nearly the least.
        savers: by kind, what its stages do to save memory.
        last_memory: what the last tables were made of.
    """

    profile: Profile
    chain: Chain
    devices: tuple[Device, ...]
    budgets: tuple[int, ...]
    excess: tuple[int, ...] = ()
    schedule: str = "naive"
    micro_batches: int = 1
    crossings: tuple[Crossing, ...] = ()
    allowed: Allowed | None = None
    is_cautious: bool = True
    limit: float | None = None
    savers: dict[Kind, Saver] = field(default_factory=dict, repr=False)
    last_memory: StageMemory | None = field(default=None, repr=False)
    _memories: dict[tuple[Reach | None, bool], StageMemory] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.excess = self.excess or (0,) * len(self.devices)

    @cached_property
    def floor(self) -> float:
        """Seconds that a step takes at least: the host launches one kernel after the other."""
        return self.micro_batches * launch_seconds(self.profile, self.devices)

    @cached_property
    def block_seconds(self) -> list[Seconds]:
        """For each device the seconds of a micro-batch in every block, there and back."""
        return [forward + backward for forward, backward in self._both_seconds]

    def peaks(self, here: frozenset[int]) -> Matrix:
        """Peaks of all stages with one micro-batch in flight, on whose device the items `here` are.

        Example:
            >>> problem.peaks(frozenset())[0, 2]

        Args:
            here: indices of items.

        Returns:
            Bytes, as `StageMemory` has them.
        """
        return self._memory(None).peaks(here)

    def unit_peaks(self) -> NDArray[np.int64]:
        """Peak of every unit by itself.

        Example:
            >>> problem.unit_peaks().argmax()
        """
        return self._any_memory.banded(frozenset(), 1, 1)[:, 0]

    def item_peak(self, item: int) -> int:
        """Peak of a device that holds nothing but one item.

        Example:
            >>> problem.item_peak(0)
        """
        return self._any_memory.empty(frozenset({item}))

    @cached_property
    def in_flight(self) -> InFlight:
        """Micro-batches in flight, by the number of stages to the end."""
        # Without backwards nothing waits for one, but the results of all micro-batches are kept to the end.
        return in_flight_of(self.schedule if self.profile.training else "gpipe", self.micro_batches)

    @property
    def overlapping(self) -> int:
        """Micro-batches that overlap.

        Where blocks beside the chain are on the device of another stage, that device waits for all stages in between:
        under 1F1B until a backward is through as a whole, and without backwards until a micro-batch is.
        """
        is_visited_twice = any(owner >= 0 for item in self.chain.items for owner in item.owners)
        waits = self.schedule == "1f1b" or (not self.profile.training and self.schedule != "looped")
        return 1 if is_visited_twice and waits and self.is_cautious else self.micro_batches

    @cached_property
    def growth(self) -> Growth:
        """What every unit adds at least to a stage."""
        kinds = kinds_for(self.devices, self.budgets, self.excess, self.chain, ())
        seconds = [self._unit_seconds(kind) for kind in kinds]
        keeps = (
            () if self.allowed and self.allowed.offload else ("forward",) if self.allowed else ("forward", "backward")
        )
        return growth_of(self.profile.timeline, self.chain, seconds, keeps)

    def tables(
        self,
        kinds: tuple[Kind, ...],
        reach: Reach | None,
        known: Mapping[tuple[int, int, int, int], int],
        *,
        hard: bool,
        memory: bool,
        transfers: bool,
    ) -> Tables:
        """Tables of the stages within reach.

        Args:
            kinds: of devices.
            reach: stages of interest; None: all.
            known: bytes by which stages were found larger.
            hard: False lets devices go over their budgets.
            memory: False leaves out what stages hold.
            transfers: False leaves out what passes between them.
        """
        units = self.chain.units
        width = len(units) if reach is None else reach.width
        self.last_memory = self._memory(reach) if memory else self.last_memory
        saves = self.allowed is not None and memory and hard
        made: Callable[..., Tables] = Tables
        if saves:
            knows = tells_optimizer(self.profile.timeline)
            without_state = partial(self._memory, reach, without_state=True) if knows else None
            made = partial(SavingTables, savers=[self._saver(kind) for kind in kinds], without_state=without_state)
        return made(
            kinds,
            self.chain,
            self._memory(reach) if memory else None,
            seconds=[self._unit_seconds(kind) for kind in kinds],
            beside=[self._seconds_beside(kind) for kind in kinds],
            arriving=self._arrivals.tables(kinds, width)
            if transfers
            else [np.zeros((1, len(units), width)) for _ in kinds],
            in_flight=self.in_flight,
            width=width,
            reach=reach,
            floor=self.floor,
            limit=self.limit,
            hard=hard,
            known=known,
        )

    def _saver(self, kind: Kind) -> Saver:
        assert self.allowed is not None, "only asked where blocks may save"
        if kind not in self.savers:
            device = self.devices[kind.devices[0]]
            blocks = self._block_costs(kind, optimizer_on_host=False)
            self.savers[kind] = Saver(
                unit_costs(blocks, self.chain),
                kind.budget - kind.excess,
                device.host_link,
                self.allowed.host_memory if self.allowed.offload else None,
                self._host_steps(kind),
                self.micro_batches,
            )
        return self.savers[kind]

    def _host_steps(self, kind: Kind) -> HostSteps | None:
        """What it takes that stages on a kind have their optimizer on the host."""
        if self.allowed is None or not self.allowed.offload or not any(row.optimizer for row in self.profile.blocks):
            return None
        link, sharing = self.devices[kind.devices[0]].host_link, sharing_of(self.micro_batches, len(self.devices))
        alone = [host_optimizer([row], link, sharing=sharing) for row in self.profile.blocks]
        owners = [owner for item in kind.items for owner in self.chain.items[item].owners if owner >= 0]

        def summed(column: Sequence[float]) -> list[float]:
            return [sum(column[owner] for owner in owners if owner >= 0) for owners in self.chain.units]

        seconds, state = [price.seconds for price in alone], [price.freed for price in alone]
        held = [price.pinned + price.held for price in alone]
        return HostSteps(
            unit_costs(self._block_costs(kind, optimizer_on_host=True), self.chain),
            np.array(summed(seconds)),
            np.array(summed(held), dtype=np.int64),
            np.array(summed(state), dtype=np.int64),
            sum(seconds[owner] for owner in owners),
            sum(held[owner] for owner in owners),
            sum(state[owner] for owner in owners),
        )

    def _block_costs(self, kind: Kind, *, optimizer_on_host: bool) -> SavingCosts:
        assert self.allowed is not None, "only asked where blocks may save"
        return saving_costs(
            self.profile.blocks,
            self._forward_seconds[kind.devices[0]].tolist(),
            recompute=self.allowed.recompute,
            offload=self.allowed.offload,
            stream=("frozen", "trainable") if self.allowed.offload else (),
            timeline=self.profile.timeline,
            training=self.profile.training,
            optimizer_on_host=optimizer_on_host,
        )

    @property
    def _any_memory(self) -> StageMemory:
        """What knows of units by themselves, which are within any reach."""
        return self.last_memory or self._memory(Reach.of(range(1, len(self.chain.units) + 1)))

    def _memory(self, reach: Reach | None, *, without_state: bool = False) -> StageMemory:
        key = reach, without_state
        if key not in self._memories:
            timeline, blocks = self.profile.timeline, len(self.profile.blocks)
            self._memories[key] = StageMemory(
                with_host(timeline, optimizer=range(blocks)) if without_state else timeline,
                self.chain,
                blocks,
                self.micro_batches,
                self.profile.training,
                self.schedule in ("gpipe", "looped"),
                reach,
            )
        return self._memories[key]

    @cached_property
    def _arrivals(self) -> Arrivals:
        return Arrivals(self.chain, self.devices, self.crossings, self.profile.training)

    @cached_property
    def _forward_seconds(self) -> list[Seconds]:
        return [forward for forward, _ in self._both_seconds]

    @cached_property
    def _both_seconds(self) -> tuple[tuple[Seconds, Seconds], ...]:
        return device_seconds(self.profile, self.devices)

    def _unit_seconds(self, kind: Kind) -> Seconds:
        known = self.block_seconds
        if self.overlapping < self.micro_batches and self.profile.training and not self._holds_blocks(kind):
            # While the device that is visited twice waits for a backward, the others get on with their forwards.
            known = [backward for _, backward in self._both_seconds]
        column = np.max([known[device] for device in kind.devices], axis=0)
        return np.array([sum(column[owner] for owner in owners if owner >= 0) for owners in self.chain.units])

    def _holds_blocks(self, kind: Kind) -> bool:
        return any(owner >= 0 for item in kind.items for owner in self.chain.items[item].owners)

    def _seconds_beside(self, kind: Kind) -> float:
        column = self.block_seconds[kind.devices[0]]
        items = (self.chain.items[item] for item in kind.items)
        return float(sum(column[owner] for item in items for owner in item.owners if owner >= 0))
