"""What a run turns out to need beyond its plan, said once, and planned for anew where that is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.plan import Plan
from autobalance.placement.contents import elements_in, tensors_in, untouchable
from autobalance.strategy.planning.plan_changes import changes
from autobalance.strategy.planning.replan import Learned
from autobalance.strategy.registration import lightning_root, overrides
from autobalance.strategy.summary import tell
from autobalance.strategy.watching.reached import ReachedPeaks
from autobalance.units import format_size

THRESHOLD = 0.05
"""Share by which a peak may lie above the plan's before it is spoken of."""


class Drift:
    """Watches the batches and peaks of a strategy's run.

    Args:
        strategy: its options say whether to plan again.

    Attributes:
        learned: what the run has shown, also to those who plan again for other reasons.
    """

    def __init__(self, strategy: Any) -> None:
        self.learned = Learned()
        self._strategy = strategy
        self._loaded: Any = None
        self._covered: int | None = None
        self._finder: type[Any] | None = None
        self._peaks: ReachedPeaks | None = None
        self._told: Plan | None = None
        self._hopeless = 0

    def begin(self, trainer: Any) -> None:
        """A run begins.

        Args:
            trainer: about to run.
        """
        finder = import_module(f"{lightning_root(trainer)}.callbacks").BatchSizeFinder
        self._finder = finder if any(isinstance(each, finder) for each in trainer.callbacks) else None
        self._peaks = self._told = None
        self._hopeless = 0

    def loads(self, batch: Any) -> None:
        """A batch comes, as the loader gives it: what a trial needs, which sends it to the device itself.

        Args:
            batch: of the next step.
        """
        module = self._strategy.lightning_module
        self._loaded = None if overrides(module, "on_before_batch_transfer") else untouchable(batch)

    def forget(self) -> None:
        """The run has ended."""
        self._loaded = self._peaks = None

    def meet(self, kind: str) -> None:
        """Plan for the batch that has come last, too.

        Args:
            kind: "train", "validate", "test" or "predict".
        """
        if self._loaded is not None:
            self.learned.meet(kind, self._loaded)

    @property
    def is_batch_larger(self) -> bool:
        """Whether the batch that has come last is larger than those that the plan covers."""
        return self._loaded is not None and self._covered is not None and elements_in(self._loaded) > self._covered

    def look(self, batch: Any, elements: int | None) -> None:
        """See whether the batch that comes next, or the peaks until now, are beyond the plan.

        Args:
            batch: on its device.
            elements: of the largest batch that the plan covers; None: not known.

        Raises:
            torch.OutOfMemoryError: Lightning looks for the largest batch, and no plan fits this one.
        """
        self._covered = elements
        if not self._is_finding_batch_size and not self._strategy.options.rebalance:
            return
        there = elements_in(batch)
        if elements is not None and there > max(elements, self._hopeless) and self._loaded is not None:
            self._plan_for_batch(batch, there, elements)
        elif self._strategy.options.rebalance:
            self._look_at_peaks(batch)

    @property
    def _is_finding_batch_size(self) -> bool:
        """Whether this is a trial of Lightning's batch-size finder, which takes all callbacks away meanwhile."""
        return self._finder is not None and not self._strategy.lightning_module.trainer.callbacks

    def _plan_for_batch(self, batch: Any, there: int, covered: int) -> None:
        largest = dict(self.learned.largest)
        self.meet("train")
        why = f"this batch has {there:,} elements, and the plan was made for up to {covered:,}"
        try:
            self._plan_again(why, batch)
        except InfeasiblePlanError as error:
            self.learned.largest = largest
            self._hopeless = there
            if self._is_finding_batch_size:
                raise torch.OutOfMemoryError(
                    f"out of memory, as a CUDA device would be, were the batch run: no plan fits it. {error}"
                ) from error
            warnings.warn(f"Because {why}, planning was tried again, but no plan fits: {error}", stacklevel=2)

    def _look_at_peaks(self, batch: Any) -> None:
        if self._peaks is None or self._peaks.plan is not self._strategy.plan:
            self._peaks = ReachedPeaks(self._strategy, tensors_in(batch, in_objects=True))
            return
        if self._told is self._strategy.plan:  # no other plan fits: what is planned again at each batch takes its time
            return
        beyond = above(self._strategy.plan, self._peaks.read())
        if not beyond:
            return
        for index, excess in beyond.items():
            self.learned.unforeseen[index] = max(self.learned.unforeseen.get(index, 0), excess)
        why = in_words(self._strategy.plan, beyond)
        try:
            self._plan_again(why, batch)
        except InfeasiblePlanError as error:
            self._told = self._strategy.plan
            warnings.warn(f"Because {why}, planning was tried again, but no plan fits: {error}", stacklevel=2)

    def _plan_again(self, why: str, batch: Any) -> None:
        before = self._strategy.plan
        tensors: Sequence[Tensor] = list(tensors_in(batch, in_objects=True))
        self._strategy.rebalance(self.learned, tensors)
        trainer = self._strategy.lightning_module.trainer
        tell(trainer, f"Because {why}, the plan was made again: {changes(before, self._strategy.plan)}.")


def above(plan: Plan, reached: Sequence[int]) -> dict[int, int]:
    """Bytes by which peaks lie above the plan's, by position of the device, where that is more than the threshold.

    Args:
        plan: predicted peaks.
        reached: bytes on each of its devices.
    """
    pairs = zip(plan.peaks, reached, strict=True)
    return {index: peak - planned for index, (planned, peak) in enumerate(pairs) if peak > planned * (1 + THRESHOLD)}


def in_words(plan: Plan, beyond: dict[int, int]) -> str:
    """What `above` found.

    Args:
        plan: predicted peaks.
        beyond: bytes above them, by position of the device.
    """
    told = [
        f"{plan.devices[index].name} has held {format_size(plan.peaks[index] + excess)}, "
        f"{excess / max(1, plan.peaks[index]):.0%} more than the {format_size(plan.peaks[index])} of the plan"
        for index, excess in beyond.items()
    ]
    return ", ".join(told)
