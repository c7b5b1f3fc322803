"""What a replay found that stages take beyond what the tables say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.solution import Solution
from autobalance.partitioning.chains.stage_costs import StageCosts
from autobalance.partitioning.savings.saver import Saver

Known = tuple[int, frozenset[int], int, int, int]
"""Budget of a device, items on it, micro-batches in flight, first unit and one past the last unit of a stage."""


@dataclass
class KnownStages(StageCosts):
    """A chain on devices, of which some stages are known better than by the tables.

    Example:
        >>> problem.learn(solution, more=[0, 4096])

    Attributes:
        known: stages that a replay found larger, and by how many bytes.
    """

    known: dict[Known, int] = field(default_factory=dict)

    def told(self, solution: Solution) -> list[int]:
        """Bytes per device that the tables say of a solution.

        Example:
            >>> problem.told(solution)

        Args:
            solution: as found.
        """
        found = []
        for device in range(len(self.devices)):
            items = frozenset(item for item, place in enumerate(solution.items) if place == device)
            stage = next(((n, i, j) for n, (place, i, j) in enumerate(solution.stages) if place == device), None)
            number, start, stop = (0, 0, 0) if stage is None else stage
            held = self.in_flight(len(solution.stages) - number)
            assert self.last_memory is not None, "a solution comes from tables"
            if self._choice(device, held, start, stop) is not None:
                found.append(self.budgets[device] - self.excess[device])
                continue
            peak = self.last_memory.peak(items, held, start, stop)
            found.append(peak + self.known.get((self.budgets[device], items, held, start, stop), 0))
        return found

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
                held = self.in_flight(len(solution.stages) - number)
                is_new = True
                saver = self._choice(device, held, start, stop)
                if saver is not None:
                    saver.learn((held, start, stop), more[device])
                    continue
                items = frozenset(item for item, place in enumerate(solution.items) if place == device)
                key = self.budgets[device], items, held, start, stop
                self.known[key] = self.known.get(key, 0) + more[device]
        return is_new

    def _choice(self, device: int, held: int, start: int, stop: int) -> Saver | None:
        """What made a stage save memory, if anything did."""
        savers = (saver for kind, saver in self.savers.items() if device in kind.devices)
        return next((saver for saver in savers if saver.choices.get((held, start, stop)) is not None), None)

    def found_larger(self, kinds: Sequence[Kind]) -> dict[tuple[int, int, int, int], int]:
        """Bytes by which stages on kinds of devices were found larger, as the tables take them.

        Args:
            kinds: of devices, as the tables count them.
        """
        return {
            (at, held, start, stop): more
            for at, kind in enumerate(kinds)
            for (budget, items, held, start, stop), more in self.known.items()
            if (budget, items) == (kind.budget, kind.items)
        }
