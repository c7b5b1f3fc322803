"""One partitioning problem: a chain of one micro-batch under budgets, and the search for its best partition."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np

from autobalance.devices.links import link_matrix
from autobalance.partitioning.chains.chosen_savings import ChosenSavings
from autobalance.partitioning.chains.kinds import Kind, kinds_for, merged
from autobalance.partitioning.chains.placements import MOST_COMBINATIONS, Placement, all_placements
from autobalance.partitioning.chains.policies import NEARLY, Cut, Policy, auto, balanced, fastest, sequential
from autobalance.partitioning.chains.reach import first_limits, limits_of, widened
from autobalance.partitioning.chains.solution import Solution, on_devices
from autobalance.partitioning.chains.sweep import MOST_STATES, count_states
from autobalance.partitioning.chains.tables import Tables
from autobalance.partitioning.judge import Judged, judge
from autobalance.partitioning.orders.item_search import Found, ItemSearch
from autobalance.partitioning.savings.choice import MILLIONTH
from autobalance.partitioning.savings.lighter import copying_less
from autobalance.partitioning.savings.saving_tables import SavingTables

_OBJECTIVES: dict[Policy, Literal["largest use", "step time"]] = {
    auto: "step time",
    fastest: "step time",
    balanced: "largest use",
}

# Searches in which stages are proved that a faster way might have.
_MOST_PROOFS = 2
# Times that stages of a way have to do with less host memory before none is taken to fit.
_MOST_TIGHTENED = 16


@dataclass
class Problem(ChosenSavings):
    """A chain to cut under budgets.

    Example:
        >>> Problem(profile, chain, devices, budgets=(11, 11)).solve(balanced)

    Attributes:
        ran_out: devices whose caching allocator would have run out under a plan whose tensors fit.
        least: seconds that a step takes at least, where some stages may have a faster way to save than is known.
        is_short_of_host: whether stages were held to parts of the host's memory, so that nothing is proved.
    """

    ran_out: set[int] = field(default_factory=set)
    least: float | None = None
    is_short_of_host: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether all placements of the items can be tried, so that what `solve` finds, or does not, is proved."""
        return len(self._placements(balanced)) <= MOST_COMBINATIONS

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
        return replace(
            self,
            devices=(like,) * count,
            budgets=(budget,) * count,
            excess=excess,
            known={},
            ran_out=set(),
            least=None,
            is_short_of_host=False,
            savers={},
        )

    def solve(
        self,
        policy: Policy,
        *,
        hard: bool = True,
        memory: bool = True,
        transfers: bool = True,
        within: float = np.inf,
    ) -> Solution | None:
        """The best partition under a policy.

        Exact where all placements of the items can be tried; otherwise they are searched, with a bound.

        Example:
            >>> problem.solve(balanced)

        Args:
            policy: what is best.
            hard: False lets devices go over their budgets.
            memory: False leaves out what stages hold.
            transfers: False leaves out what passes between them.
            within: seconds of a step that are known to be possible, which spares work.

        Returns:
            None where budgets leave no way, or where none was found and not all could be tried.
        """
        best: tuple[Cut, tuple[int, ...], tuple[Kind, ...]] | None = None
        placements = self._placements(policy)
        is_exact = len(placements) <= MOST_COMBINATIONS
        searched = None if is_exact else self._search_items(policy, hard)
        for placement in placements if searched is None else [searched.placement]:
            kinds, found = self._cut(policy, placement, hard, memory, transfers, within)
            if found is not None and (best is None or found.key < best[0].key):
                best = found, placement, kinds
        if best is None:
            return None
        found, placement, kinds = best
        stages = on_devices(found.path, kinds)
        assignment, root = self.chain.assignment(stages, placement)
        proved = is_exact and not self._is_merged and not self._is_short
        proved = proved and self.overlapping == self.micro_batches
        # Any that saves memory is as balanced as any other that does, and less so than one that keeps all.
        proved = proved and (policy is balanced or not memory or not self.is_coarse)
        saving, streamed = self.savings(found.path, kinds)
        choices = self.choices(found.path, kinds)
        loose = None if self.is_short_of_host or not self.is_exact or policy not in (auto, fastest) else self.least
        bound = found.key[0] if proved else loose if searched is None else searched.bound
        return Solution(
            found.key,
            assignment,
            root,
            proved,
            stages,
            placement,
            saving,
            streamed,
            tuple(
                sorted(device for (device, _, _), choice in zip(stages, choices, strict=True) if choice and choice.once)
            ),
            sum(choice.pinned for choice in choices if choice),
            bound,
        )

    def judge(self, solution: Solution) -> Judged:
        """Replay and time a solution.

        Example:
            >>> problem.judge(problem.solve(balanced)).peaks

        Args:
            solution: of this problem.
        """
        return judge(
            self.profile,
            solution.assignment,
            solution.root,
            self.devices,
            self.crossings,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            saving=solution.saving,
            streamed=solution.streamed,
            host_optimizer=solution.host_optimizer,
        )

    def _placements(self, policy: Policy) -> list[Placement]:
        """Where the items may go; where devices are filled in order, none of them is like another."""
        kinds = kinds_for(self.devices, self.budgets, self.excess, self.chain, ())
        given = [item.device for item in self.chain.items]
        alike = [(device,) for kind in kinds for device in kind.devices] if policy is sequential else None
        return all_placements(given, alike or [kind.devices for kind in kinds], MOST_COMBINATIONS)

    @property
    def _is_short(self) -> bool:
        return self.is_short_of_host or self.least is not None

    def _search_items(self, policy: Policy, hard: bool) -> Found:
        def cost(placement: Placement) -> tuple[float, ...]:
            _, found = self._cut(policy, placement, hard)
            if found is not None:
                return found.key
            # Over budget everywhere: the way back leads along the least largest use.
            _, loose = self._cut(balanced, placement, hard=False)
            return (float("inf"), *(loose.key if loose is not None else ()))

        search = ItemSearch(
            self.chain,
            self.profile.timeline,
            self.budgets,
            np.array(self.block_seconds).T,
            link_matrix(self.devices),
            self.crossings,
            self.micro_batches,
        )
        return search.best(cost, _OBJECTIVES.get(policy) if hard else None)

    @cached_property
    def _is_merged(self) -> bool:
        kinds = kinds_for(self.devices, self.budgets, self.excess, self.chain, ())
        return count_states([len(kind.devices) for kind in kinds]) > MOST_STATES

    def _cut(
        self,
        policy: Policy,
        placement: tuple[int, ...],
        hard: bool,
        memory: bool = True,
        transfers: bool = True,
        within: float = np.inf,
    ) -> tuple[tuple[Kind, ...], Cut | None]:
        kinds = merged(kinds_for(self.devices, self.budgets, self.excess, self.chain, placement), MOST_STATES)
        growth = self.growth
        make = partial(self.tables, known=self.found_larger(kinds), hard=hard, memory=memory, transfers=transfers)
        if growth.is_short or not hard:
            return kinds, self._chosen(policy, make(kinds, None))
        widest = float(max(kind.budget for kind in kinds)) if memory else np.inf
        limits = first_limits(policy, growth, self.budgets, self.overlapping, self.in_flight, memory=memory)
        if np.isfinite(within) and self.overlapping > 1:
            # Nothing that is faster has a longer stage.
            limits = limits[0], (within * (1 + NEARLY) - float(growth.seconds.sum())) / (self.overlapping - 1)
        # What `auto` compares with the least step time is only worth looking for once that is known.
        first = fastest if policy is auto else policy
        while True:
            reach = growth.reach(*limits)
            tables = make(kinds, reach)
            found = self._chosen(first, tables)
            needed = limits_of(policy, growth, found, widest, self.overlapping, self.floor)
            if growth.reach(*needed).is_within(reach):
                return kinds, found if first is policy or found is None else self._chosen(policy, tables)
            limits = widened(limits, needed, is_found=found is not None)

    def _chosen(self, policy: Policy, tables: Tables) -> Cut | None:
        """Search until what its stages save is no bound any more, but the true choice, within the host's memory."""
        host, tightened = self.allowed.host_memory if self.allowed is not None and self.allowed.offload else None, 0
        proofs = 0
        while True:
            found = policy(tables, self.overlapping)
            if found is None or not isinstance(tables, SavingTables):
                return found
            # Where the host's memory is short nothing is proved, and a solver's time is lost.
            may_solve = self.allowed is not None and self.allowed.solver and not self.is_short_of_host
            if tables.choose(found.path) or (may_solve and tables.choose(found.path, program=True)):
                continue
            if host is None or tables.pinned(found.path) <= host:
                if may_solve and not tables.proved and policy in (auto, fastest):
                    least = fastest(tables.loosened(), self.micro_batches)
                    assert least is not None, "lower bounds leave at least the same ways"
                    if least.key[0] < found.key[0] * (1 - MILLIONTH):
                        proofs += 1
                        if proofs <= _MOST_PROOFS and tables.choose(least.path, program=True):
                            continue
                        self.least = min(least.key[0], self.least or np.inf)
                may_copy = host is not None and policy is auto
                return copying_less(tables, found, self.overlapping, host or 0) if may_copy else found
            if tightened == _MOST_TIGHTENED:
                return None
            tables.tighten(found.path, host)
            self.is_short_of_host, tightened = True, tightened + 1
