"""Stages that go over the devices round after round: how long and how full a way to cut them is, by estimate.

A search over cuts asks for thousands of ways, many at once. Memory is therefore what the rows of the profile add up to;
times are exact but for tensors that skip stages. What is found is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autobalance.devices.links import link_matrix
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.savings.savings import KEEP, RECOMPUTE, saving_costs
from autobalance.partitioning.times import device_seconds
from autobalance.partitioning.transfers import received
from autobalance.profiling.profile import Profile
from autobalance.schedules.launches import launch_order

Cuts = tuple[int, ...]
"""One past the last unit of every stage but the last one."""
Ways = NDArray[np.int64]
"""Cuts of many ways at once, a row for each."""
Costs = NDArray[np.float64]


class Rounds:
    """A chain in stages whose devices are given and whose ends are not.

    Example:
        >>> Rounds(problem, items=(), places=[0, 1, 0, 1]).seconds(np.array([[2, 4, 6], [1, 4, 6]]))

    Args:
        problem: whose chain is cut, with the schedule and the micro-batches.
        items: device of each item of the chain.
        places: device of each stage.
        saving: `"keep"` or `"recompute"` for each block; empty: all keep what they save.
    """

    def __init__(
        self, problem: Problem, items: Sequence[int], places: Sequence[int], saving: Sequence[str] = ()
    ) -> None:
        profile, chain = problem.profile, problem.chain
        self.saving = tuple(saving) if RECOMPUTE in saving else ()
        self.places, self.units = tuple(places), len(chain.units)
        self._where = np.array(places)
        self._bound, self._floor = chain.bound, problem.floor
        self._order = launch_order(
            problem.schedule, len(places), problem.micro_batches, devices=places, training=profile.training
        )
        owners = [[owner for owner in members if owner >= 0] for members in chain.units]
        held = problem.micro_batches if problem.schedule == "looped" and profile.training else 1
        rows, again = (
            profile.blocks,
            np.array([word == RECOMPUTE for word in self.saving or [KEEP] * len(profile.blocks)]),
        )
        less = np.where(again, _less(profile), 0.0) if again.any() else np.zeros(len(rows))
        self.freed_bytes = held * less
        bytes_of = np.array([block.static + held * block.saved for block in rows], dtype=np.float64) - held * less
        peaks = np.array([max(block.forward_transient, block.backward_transient) for block in rows]) + less
        self._bytes = _prefix(bytes_of, owners)
        self._transients = _largest_of(np.array([peaks[members].max(initial=0.0) for members in owners]))
        self._on_device = (self._where[:, None] == np.arange(len(problem.devices))).astype(np.float64)
        beside = np.zeros(len(problem.devices))
        for item, device in zip(chain.items, items, strict=True):
            beside[device] += sum(bytes_of[owner] for owner in item.owners if owner >= 0)
        self._beside = beside
        times = device_seconds(profile, problem.devices)
        self._forward = np.array([_prefix(forward, owners) for forward, _ in times])
        self._backward = np.array([_prefix(backward + again * forward, owners) for forward, backward in times])
        self._received = received(problem.crossings, chain.units, profile.training).astype(np.float64)
        before = [places[-1], *places[:-1]]  # the batch comes from the root, which is with the last block
        self._links = link_matrix(problem.devices)[before, self._where]

    def stages(self, cuts: Cuts) -> tuple[tuple[int, int, int], ...]:
        """(device, first unit, one past the last) of every stage.

        Args:
            cuts: where the chain is cut, round by round.
        """
        return tuple(
            (device, *ends) for device, ends in zip(self.places, pairwise([0, *cuts, self.units]), strict=True)
        )

    @cached_property
    def _ticks(self) -> list[tuple[bool, NDArray[np.int64], NDArray[np.int64]]]:
        """Stages and micro-batches of launches one after the other that do not wait for one another, if at all."""
        found: list[tuple[bool, list[int], list[int]]] = []
        devices, numbers = set[int](), set[int]()
        for launch in self._order:
            device, number = self.places[launch.stage], launch.micro_batch
            if not found or found[-1][0] != launch.backward or device in devices or number in numbers:
                found.append((launch.backward, [], []))
                devices, numbers = set(), set()
            found[-1][1].append(launch.stage)
            found[-1][2].append(number)
            devices.add(device)
            numbers.add(number)
        return [(is_backward, np.array(stages), np.array(copies)) for is_backward, stages, copies in found]

    @property
    def launches(self) -> int:
        """Launches of a step."""
        return len(self._order)

    def seconds(self, ways: Ways) -> Costs:
        """Seconds of a step for every way, by the clocks of the devices, as `schedules.clock.run_clock` has them.

        Args:
            ways: to cut the chain.
        """
        starts, stops = self._bounds(ways)
        waits = self._received[starts, stops] / self._links
        share = waits / 2 if self._order[-1].backward else waits
        times = [
            np.ascontiguousarray((column[self._where, stops] - column[self._where, starts] + share).T)
            for column in (self._forward, self._backward)
        ]
        free = np.zeros((len(self._on_device.T), len(ways)))
        # What a launch needs is what its micro-batch did last.
        done = np.zeros((1 + max(launch.micro_batch for launch in self._order), len(ways)))
        for is_backward, stages, numbers in self._ticks:
            devices = self._where[stages]
            stop = np.maximum(free[devices], done[numbers]) + times[is_backward][stages]
            free[devices] = done[numbers] = stop
        seconds: Costs = np.maximum(self._floor, free.max(axis=0))
        return seconds

    def peaks(self, ways: Ways) -> Costs:
        """`[way, device]`: bytes at the peak, by the rows of the profile."""
        starts, stops = self._bounds(ways)
        held = (self._bytes[stops] - self._bytes[starts]) @ self._on_device + self._beside
        most = self._transients[starts, stops]
        here = [np.flatnonzero(column) for column in self._on_device.T]
        peaks: Costs = held + np.array([most[:, stages].max(axis=1, initial=0.0) for stages in here]).T
        return peaks

    def keeps_bounds(self, ways: Ways) -> NDArray[np.bool_]:
        """Whether units that are bound to a device are there, for every way."""
        stops = self._bounds(ways)[1]
        kept = np.ones(len(ways), dtype=np.bool_)
        for unit, device in self._bound.items():
            kept &= self._where[(stops <= unit).sum(axis=1)] == device
        return kept

    def even_in_time(self, first: int, last: int, start: int, stop: int) -> Cuts | None:
        """Cuts of some units into some stages with the least longest stage in seconds.

        Args:
            first, last: stages, from the first to one past the last.
            start, stop: units.

        Returns:
            None where bound units leave no way.
        """

        def table_of(stage: int) -> Costs:
            sums = self._forward[self.places[stage]] + self._backward[self.places[stage]]
            table: Costs = sums[None, :] - sums[:, None] + self._received / self._links[stage]
            return table

        return self._evenest(table_of, range(first, last), start, stop)

    def even_in_bytes(self, first: int, last: int, start: int, stop: int, budgets: Costs) -> Cuts | None:
        """The same with the least largest share of the budgets.

        Args:
            first, last: stages, from the first to one past the last.
            start, stop: units.
            budgets: bytes per device.
        """
        held = self._bytes[None, :] - self._bytes[:, None]

        def table_of(stage: int) -> Costs:
            table: Costs = held / max(1.0, float(budgets[self.places[stage]]))
            return table

        return self._evenest(table_of, range(first, last), start, stop)

    def _bounds(self, ways: Ways) -> tuple[Ways, Ways]:
        """First unit, and one past the last, of every stage of every way."""
        column = np.zeros((len(ways), 1), dtype=np.int64)
        bounds = np.concatenate([column, ways, column + self.units], axis=1)
        return bounds[:, :-1], bounds[:, 1:]

    def _evenest(self, table_of: Callable[[int], Costs], stages: range, start: int, stop: int) -> Cuts | None:
        """By dynamic programming from the last stage to the first: `rest[k]` is the least largest cost from `k` on."""
        units = np.arange(self.units + 1)
        rest = np.where(units == stop, 0.0, np.inf)
        follow = []
        for stage in reversed(stages):
            costs = np.where(units[:, None] < units[None, :], table_of(stage), np.inf)
            for unit, device in self._bound.items():
                if self.places[stage] != device:
                    costs[: unit + 1, unit + 1 :] = np.inf
            costs = np.maximum(costs, rest[None, :])
            follow.append(costs.argmin(axis=1))
            rest = costs.min(axis=1)
        if not np.isfinite(rest[start]):
            return None
        cuts, at = [], start
        for choice in reversed(follow):
            at = int(choice[at])
            cuts.append(at)
        return tuple(cuts[:-1])


def recomputing(profile: Profile) -> tuple[str, ...]:
    """All blocks that hold less so run their forward again; the others keep what they save.

    Example:
        >>> recomputing(profile)
        ('recompute', 'recompute', 'keep')

    Args:
        profile: of the model.
    """
    return tuple(RECOMPUTE if less > 0 else KEEP for less in _less(profile))


def _less(profile: Profile) -> Costs:
    """Bytes that every block holds less between forward and backward where it is recomputed."""
    costs = saving_costs(profile.blocks, [0.0] * len(profile.blocks), timeline=profile.timeline)
    return np.where(costs.recomputable, costs.saved - costs.kept, 0).astype(np.float64)


def _prefix(column: Costs, owners: Sequence[Sequence[int]]) -> Costs:
    """What the units before each one add up to."""
    return np.concatenate([[0.0], np.cumsum([float(column[list(members)].sum()) for members in owners])])


def _largest_of(column: Costs) -> Costs:
    """`[i, j]`: the largest entry of `[i, j)`."""
    count = len(column)
    largest = np.zeros((count + 1, count + 1))
    for start in range(count):
        largest[start, start + 1 :] = np.maximum.accumulate(column[start:])
    return largest
