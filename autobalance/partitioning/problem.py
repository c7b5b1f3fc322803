"""One partitioning problem: a chain of one micro-batch, devices and budgets; where the items beside the chain go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from autobalance.devices.device import Device
from autobalance.devices.links import link_between
from autobalance.partitioning.chain import Chain
from autobalance.partitioning.kinds import Kind, kinds_for, merged
from autobalance.partitioning.policies import Cut, Policy, auto, balanced, fastest
from autobalance.partitioning.reach import Growth, first_limits, growth_of, limits_of, widened
from autobalance.partitioning.saver import Allowed, Saver, unit_costs
from autobalance.partitioning.saving_tables import SavingTables
from autobalance.partitioning.savings import saving_costs
from autobalance.partitioning.stage_memory import StageMemory
from autobalance.partitioning.stage_peaks import Matrix, Reach
from autobalance.partitioning.sweep import MOST_STATES, Path, count_states
from autobalance.partitioning.tables import InFlight, Tables, in_flight_of
from autobalance.partitioning.times import device_seconds, launch_seconds
from autobalance.partitioning.transfers import Crossing, received
from autobalance.partitioning.work_table import Seconds
from autobalance.profiling.profile import Profile

# Placements of the items that are tried one by one; beyond, they improve one another in turn, without a proof.
MOST_COMBINATIONS = 4096

Known = tuple[int, frozenset[int], int, int, int]
"""Budget of a device, items on it, micro-batches in flight, first unit and one past the last unit of a stage."""


@dataclass(frozen=True)
class Solution:
    """A partition and its proof.

    Attributes:
        key: what the policy minimised.
        assignment: device per block.
        root: device of the root.
        proved: whether no other way of this kind is better.
        stages: (device, first unit, one past the last) of the stages of the chain.
        items: device of each item.
        saving: "keep", "recompute" or "offload" for each block; empty: all keep.
        streamed: blocks whose weights stream from the host.
    """

    key: tuple[float, ...]
    assignment: tuple[int, ...]
    root: int
    proved: bool
    stages: tuple[tuple[int, int, int], ...] = ()
    items: tuple[int, ...] = ()
    saving: tuple[str, ...] = ()
    streamed: tuple[int, ...] = ()


@dataclass
class Problem:
    """A chain to cut under budgets.

    Example:
        >>> Problem(profile, chain, devices, budgets=(11, 11)).solve(balanced)

    Attributes:
        profile: of one micro-batch.
        chain: units and items.
        devices: of the question.
        budgets: bytes per device.
        excess: bytes by which each device, where it holds something, is known to stand above the replay.
        schedule: order of the micro-batches.
        micro_batches: how many there are.
        crossings: tensors that go from block to block.
        known: stages that a replay found larger, and by how many bytes.
        allowed: what blocks may do to save memory; None: nothing.
    """

    profile: Profile
    chain: Chain
    devices: tuple[Device, ...]
    budgets: tuple[int, ...]
    excess: tuple[int, ...] = ()
    schedule: str = "naive"
    micro_batches: int = 1
    crossings: tuple[Crossing, ...] = ()
    known: dict[Known, int] = field(default_factory=dict)
    allowed: Allowed | None = None
    _savers: dict[Kind, Saver] = field(default_factory=dict, repr=False)
    _memories: dict[Reach | None, StageMemory] = field(default_factory=dict, repr=False)
    _best_memory: StageMemory | None = field(default=None, repr=False)
    _arrivals: dict[frozenset[int], Matrix] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.excess = self.excess or (0,) * len(self.devices)

    def peaks(self, here: frozenset[int]) -> Matrix:
        """Peaks of all stages with one micro-batch in flight, on whose device the items `here` are.

        Example:
            >>> problem.peaks(frozenset())[0, 2]
        """
        return self._memory(None).peaks(here)

    def unit_peaks(self) -> NDArray[np.int64]:
        """Peak of every unit by itself.

        Example:
            >>> problem.unit_peaks().argmax()
        """
        count = len(self.chain.units)
        alone = None if None in self._memories else Reach.of(range(1, count + 1))
        return self._memory(alone).peaks(frozenset()).diagonal(1)

    def item_peak(self, item: int) -> int:
        """Peak of a device that holds nothing but one item.

        Example:
            >>> problem.item_peak(0)
        """
        alone = None if None in self._memories else Reach.of(range(1, len(self.chain.units) + 1))
        return int(self._memory(alone).peaks(frozenset({item}))[0, 0])

    def told(self, solution: Solution) -> list[int]:
        """Bytes per device that the tables say of a solution.

        Example:
            >>> problem.told(solution)
        """
        found = []
        for device in range(len(self.devices)):
            items = frozenset(item for item, place in enumerate(solution.items) if place == device)
            stage = next(((n, i, j) for n, (place, i, j) in enumerate(solution.stages) if place == device), None)
            number, start, stop = (0, 0, 0) if stage is None else stage
            held = self._in_flight(len(solution.stages) - number)
            assert self._best_memory is not None, "a solution comes from tables"
            peak = int(self._best_memory.peaks(items, held)[start, stop])
            found.append(peak + self.known.get((self.budgets[device], items, held, start, stop), 0))
        return found

    @property
    def is_exact(self) -> bool:
        """Whether all placements of the items can be tried, so that what `solve` finds, or does not, is proved."""
        return len(self._placements) <= MOST_COMBINATIONS

    def on_equal_devices(self, count: int, budget: int) -> Problem:
        """The same problem on other devices, all like the one with the largest budget.

        Example:
            >>> problem.on_equal_devices(8, budget=80 * 2**30).solve(sequential)

        Args:
            count: how many.
            budget: bytes of each.
        """
        like = self.devices[max(range(len(self.devices)), key=self.budgets.__getitem__)]
        excess = (*self.excess, *[max(self.excess)] * (count - len(self.excess)))
        return replace(self, devices=(like,) * count, budgets=(budget,) * count, excess=excess, known={}, _arrivals={})

    @cached_property
    def floor(self) -> float:
        """Seconds that a step takes at least: the host launches one kernel after the other."""
        return self.micro_batches * launch_seconds(self.profile, self.devices)

    @cached_property
    def block_seconds(self) -> list[Seconds]:
        """For each device the seconds of a micro-batch in every block, there and back."""
        return [forward + backward for forward, backward in self._both_seconds]

    @cached_property
    def _forward_seconds(self) -> list[Seconds]:
        return [forward for forward, _ in self._both_seconds]

    @cached_property
    def _both_seconds(self) -> tuple[tuple[Seconds, Seconds], ...]:
        return device_seconds(self.profile, self.devices)

    def solve(self, policy: Policy, *, hard: bool = True, memory: bool = True) -> Solution | None:
        """The best partition under a policy.

        Exact where all placements of the items can be tried; otherwise the items take turns, each moving to its best
        device, until none moves.

        Example:
            >>> problem.solve(balanced)

        Args:
            policy: what is best.
            hard: False lets devices go over their budgets.
            memory: False leaves out what stages hold.

        Returns:
            None where budgets leave no way, or where none was found and not all could be tried.
        """
        best: tuple[Cut, tuple[int, ...], tuple[Kind, ...]] | None = None
        for placement in self._placements if self.is_exact else self._descent(policy, hard):
            kinds, found = self._cut(policy, placement, hard, memory)
            if found is not None and (best is None or found.key < best[0].key):
                best = found, placement, kinds
        if best is None:
            return None
        found, placement, kinds = best
        stages = _on_devices(found.path, kinds)
        assignment, root = self.chain.assignment(stages, placement)
        proved = self.is_exact and not self._is_merged
        saving, streamed = self._savings(found.path, kinds)
        return Solution(found.key, assignment, root, proved, stages, placement, saving, streamed)

    def _savings(self, path: Path, kinds: tuple[Kind, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """What becomes of the saved tensors of each block, and the blocks whose weights stream."""
        saving, streamed = ["keep"] * len(self.profile.blocks), list[int]()
        for number, (at, start, stop) in enumerate(path if self.allowed is not None else ()):
            stage = self._in_flight(len(path) - number), start, stop
            choice = self._savers[kinds[at]].choices.get(stage)
            if choice is None:
                continue
            for unit, word in zip(range(start, stop), choice.saving, strict=True):
                for owner in self.chain.units[unit]:
                    if owner >= 0 and word != "keep" and self._may(word, owner):
                        saving[owner] = word
            streamed += [owner for unit in choice.streamed for owner in self.chain.units[unit] if owner >= 0]
        return (tuple(saving) if any(word != "keep" for word in saving) else ()), tuple(streamed)

    def _may(self, word: str, owner: int) -> bool:
        block = self.profile.blocks[owner]
        return block.saved > (block.inputs if word == "recompute" else 0)

    def learn(self, solution: Solution, more: Sequence[int]) -> bool:
        """Note by how much the stages of a solution stood above what the tables say, so that a new search knows.

        Example:
            >>> problem.learn(solution, more=[0, 4096])

        Args:
            solution: as found.
            more: bytes per device.

        Returns:
            Whether anything is new.
        """
        is_new = False
        for number, (device, start, stop) in enumerate(solution.stages):
            if more[device] > 0:
                held = self._in_flight(len(solution.stages) - number)
                saver = next((saver for kind, saver in self._savers.items() if device in kind.devices), None)
                if saver is not None and saver.choices.get((held, start, stop)) is not None:
                    saver.learn((held, start, stop), more[device])
                    is_new = True
                    continue
                items = frozenset(item for item, place in enumerate(solution.items) if place == device)
                key = self.budgets[device], items, held, start, stop
                self.known[key] = self.known.get(key, 0) + more[device]
                is_new = True
        return is_new

    @cached_property
    def _in_flight(self) -> InFlight:
        return in_flight_of(self.schedule, self.micro_batches)

    @cached_property
    def _is_merged(self) -> bool:
        kinds = kinds_for(self.devices, self.budgets, self.excess, self.chain, ())
        return count_states([len(kind.devices) for kind in kinds]) > MOST_STATES

    @cached_property
    def _placements(self) -> list[tuple[int, ...]]:
        """Devices of the items; of placements that differ only in devices of one kind, the first."""
        alike = [kind.devices for kind in kinds_for(self.devices, self.budgets, self.excess, self.chain, ())]
        kind_of = {device: at for at, devices in enumerate(alike) for device in devices}
        given = [item.device for item in self.chain.items]
        special = {device for device in given if device is not None}
        found: list[tuple[int, ...]] = [()]
        for wanted in given:
            longer = []
            for placement in found:
                if wanted is not None:
                    longer.append((*placement, wanted))
                    continue
                taken = {*placement, *special}
                fresh = {
                    kind_of[device]: device for device in reversed(range(len(self.devices))) if device not in taken
                }
                longer += [(*placement, device) for device in sorted({*taken, *fresh.values()})]
            found = longer
            if len(found) > MOST_COMBINATIONS:
                break
        return found

    def _descent(self, policy: Policy, hard: bool) -> Iterator[tuple[int, ...]]:
        movable = [index for index, item in enumerate(self.chain.items) if item.device is None]

        def cost(placement: tuple[int, ...]) -> tuple[float, ...]:
            _, found = self._cut(policy, placement, hard)
            if found is not None:
                return found.key
            # Over budget everywhere: the way back leads along the least largest use.
            _, loose = self._cut(balanced, placement, hard=False)
            return (float("inf"), *(loose.key if loose is not None else ()))

        order = {index: at % len(self.devices) for at, index in enumerate(movable)}
        chosen = tuple(
            order[index] if item.device is None else item.device for index, item in enumerate(self.chain.items)
        )
        least = cost(chosen)
        moved = True
        while moved:
            moved = False
            for index in movable:
                for device in range(len(self.devices)):
                    trial = (*chosen[:index], device, *chosen[index + 1 :])
                    if (price := cost(trial)) < least:
                        chosen, least, moved = trial, price, True
        yield chosen

    def _cut(
        self, policy: Policy, placement: tuple[int, ...], hard: bool, memory: bool = True
    ) -> tuple[tuple[Kind, ...], Cut | None]:
        kinds = merged(kinds_for(self.devices, self.budgets, self.excess, self.chain, placement), MOST_STATES)
        growth = self._growth
        if growth.is_short or not hard:
            tables = self._tables(kinds, None, hard, memory)
            return kinds, self._chosen(policy, tables)
        widest = float(max(kind.budget for kind in kinds)) if memory else np.inf
        limits = first_limits(policy, growth, len(self.devices), widest, self.micro_batches)
        # What `auto` compares with the least step time is only worth looking for once that is known.
        first = fastest if policy is auto else policy
        while True:
            reach = growth.reach(*limits)
            tables = self._tables(kinds, reach, hard, memory)
            found = self._chosen(first, tables)
            needed = limits_of(policy, growth, found, widest, self.micro_batches, self.floor)
            if growth.reach(*needed).is_within(reach):
                return kinds, found if first is policy or found is None else self._chosen(policy, tables)
            limits = widened(limits, needed, is_found=found is not None)

    def _chosen(self, policy: Policy, tables: Tables) -> Cut | None:
        """Search until what its stages save is no bound any more, but the true choice."""
        while True:
            found = policy(tables, self.micro_batches)
            if found is None or not isinstance(tables, SavingTables) or not tables.choose(found.path):
                return found

    def _tables(self, kinds: tuple[Kind, ...], reach: Reach | None, hard: bool, memory: bool) -> Tables:
        units = self.chain.units
        self._best_memory = self._memory(reach) if memory else self._best_memory
        saves = self.allowed is not None and memory and hard
        made = partial(SavingTables, savers=[self._saver(kind) for kind in kinds]) if saves else Tables
        return made(
            kinds,
            self.chain,
            self._memory(reach) if memory else None,
            seconds=[self._unit_seconds(kind) for kind in kinds],
            beside=[self._seconds_beside(kind) for kind in kinds],
            received=[self._received(kind.items) for kind in kinds],
            links=self._links(kinds),
            in_flight=self._in_flight,
            width=len(units) if reach is None else reach.width,
            reach=reach,
            floor=self.floor,
            hard=hard,
            known=self._found_larger(kinds),
        )

    def _saver(self, kind: Kind) -> Saver:
        assert self.allowed is not None, "only asked where blocks may save"
        if kind not in self._savers:
            device = self.devices[kind.devices[0]]
            blocks = saving_costs(
                self.profile.blocks,
                self._forward_seconds[kind.devices[0]].tolist(),
                recompute=self.allowed.recompute,
                offload=self.allowed.offload,
                stream=("frozen", "trainable") if self.allowed.offload else (),
            )
            self._savers[kind] = Saver(
                unit_costs(blocks, self.chain),
                kind.budget - kind.excess,
                device.host_link,
                self.allowed.host_memory if self.allowed.offload else None,
            )
        return self._savers[kind]

    def _found_larger(self, kinds: Sequence[Kind]) -> dict[tuple[int, int, int, int], int]:
        return {
            (at, held, start, stop): more
            for at, kind in enumerate(kinds)
            for (budget, items, held, start, stop), more in self.known.items()
            if (budget, items) == (kind.budget, kind.items)
        }

    def _memory(self, reach: Reach | None) -> StageMemory:
        if reach not in self._memories:
            self._memories[reach] = StageMemory(
                self.profile.timeline,
                self.chain,
                len(self.profile.blocks),
                self.micro_batches,
                self.profile.training,
                reach,
            )
        return self._memories[reach]

    @cached_property
    def _growth(self) -> Growth:
        kinds = kinds_for(self.devices, self.budgets, self.excess, self.chain, ())
        seconds = [self._unit_seconds(kind) for kind in kinds]
        keeps = (
            () if self.allowed and self.allowed.offload else ("forward",) if self.allowed else ("forward", "backward")
        )
        return growth_of(self.profile.timeline, self.chain, seconds, keeps)

    def _unit_seconds(self, kind: Kind) -> Seconds:
        column = np.max([self.block_seconds[device] for device in kind.devices], axis=0)
        return np.array([sum(column[owner] for owner in owners if owner >= 0) for owners in self.chain.units])

    def _seconds_beside(self, kind: Kind) -> float:
        column = self.block_seconds[kind.devices[0]]
        items = (self.chain.items[item] for item in kind.items)
        return float(sum(column[owner] for item in items for owner in item.owners if owner >= 0))

    def _received(self, here: frozenset[int]) -> Matrix:
        if here not in self._arrivals:
            beside = [owner for item in here for owner in self.chain.items[item].owners]
            self._arrivals[here] = received(self.crossings, self.chain.units, self.profile.training, beside)
        return self._arrivals[here]

    def _links(self, kinds: Sequence[Kind]) -> Seconds:
        """Bytes per second into each kind, by the kind before; a single row where that makes no difference."""
        devices = self.devices
        links = np.full((len(kinds) + 1, len(kinds)), np.inf)
        for to, kind in enumerate(kinds):
            for before, other in enumerate(kinds):
                pairs = [(i, j) for i in other.devices for j in kind.devices if i != j]
                if pairs:
                    i, j = pairs[0]
                    links[before, to] = link_between(devices[i], devices[j])
            # Tensors of the batch come from the root, which is somewhere else.
            links[-1, to] = links[:-1, to].min()
        finite = links[np.isfinite(links)]
        if not len(finite):
            return np.full((1, len(kinds)), np.inf)
        if (finite == finite[0]).all():
            return np.full((1, len(kinds)), finite[0])
        return links


def _on_devices(path: Path, kinds: Sequence[Kind]) -> tuple[tuple[int, int, int], ...]:
    """Stages on devices: those of one kind in order."""
    free = [list(kind.devices) for kind in kinds]
    return tuple((free[kind].pop(0), start, stop) for kind, start, stop in path)
