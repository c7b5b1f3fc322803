"""Batches in parts: each part is a micro-batch of the step, and what they give is merged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from autobalance.compat import skips_backward
from autobalance.execution.batch_norm import FEWEST_SAMPLES, deferring, install_deferred
from autobalance.execution.batches.sample_layout import UnsplittableBatchError
from autobalance.execution.batches.splitting import Parts, parts_of
from autobalance.execution.equivalence.equivalence import Verdict
from autobalance.execution.equivalence.few_samples import Portion
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.seeds import step_seed
from autobalance.strategy.parts.inner_backwards import InnerBackwards
from autobalance.strategy.parts.pipelined import PartlySkippedError, PipelinedSteps, without_graph
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.parts.room_for_test import has_room_for_two
from autobalance.strategy.parts.self_test import log_rules, verdict_on
from autobalance.strategy.parts.splittable import hooks_after_accumulation
from autobalance.strategy.parts.toggled import Toggled
from autobalance.strategy.summary import tell


@dataclass(frozen=True)
class _Checked:
    """What the test before the first batch of a step has found: how to split its batches, or why not to."""

    steps: PipelinedSteps
    verdict: Verdict

    @property
    def reduction(self) -> str:
        return "sum" if self.verdict.loss_rule == "sum" else "mean"

    @property
    def rules(self) -> dict[str, Any]:
        return {"rules": self.verdict.output_rules, "log_rules": log_rules(self.verdict)}


class MicroBatchedSteps:
    """Splits the batches of one Trainer, and stands between its `training_step`, `zero_grad` and `backward`.

    Args:
        trainer: in a run, its model placed.
        pipeline: runs micro-batches; the doors of the model's blocks tell it of their calls.
        glue: the context for the user's code.
        count: into how many parts a batch is split, as far as it has samples.
        defers_norms: whether batch norms' running statistics are to be those of the full batch.
        look: told of the parts of every batch before they run.
    """

    def __init__(
        self,
        trainer: Any,
        pipeline: Pipeline,
        glue: Callable[[], AbstractContextManager[None]],
        count: int,
        defers_norms: bool = False,
        look: Callable[[Parts], None] = lambda parts: None,
    ) -> None:
        self._trainer = trainer
        self._pipeline = pipeline
        self._count = count
        self._glue = glue
        self._look = look
        self._checked: dict[tuple[Any, ...], _Checked] = {}
        self._backwards: InnerBackwards | None = None
        self._warned_of: set[type[ValueError]] = set()
        self._norms = install_deferred(trainer.lightning_module) if defers_norms else None

    is_in_window = False
    """Whether batches that are still to come have been run: never."""

    @property
    def have_run_backward(self) -> bool:
        """Whether the training step before has made its gradients, which `backward` then only gives back."""
        return self._backwards is not None

    def refusal(self, step: Callable[..., Any], batch: Any, *others: Any) -> str | None:
        """Why batches of this step must not be split, as a test on a part of the first one shows; None: they may.

        Args:
            step: Lightning's step of the strategy.
            batch: of the step.
            others: what else the step takes.
        """
        checked = self._check(step, batch, others)
        return None if checked.verdict.ok else checked.verdict.reason

    def train(self, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Run one training step, its backwards too.

        Args:
            step: Lightning's step of the strategy.
            batch: of the step.
            others: what else the step takes.

        Returns:
            What the step would return for the full batch.
        """
        self._backwards = None  # Lightning asks for no backward of a batch without a loss, as the one before may be
        checked, run = self._check(step, batch, others), self._run(step, others)
        parts = self._parts(batch, trains=True)
        if len(parts.sizes) < 2:
            return run(batch)
        self._look(parts)
        seed = step_seed(self._trainer.fit_loop.total_batch_idx)
        if skips_backward(self._trainer):
            return checked.steps.evaluate(parts, lambda part: without_graph(run(part)), **checked.rules, seed=seed)
        backwards = InnerBackwards(self._trainer, self._glue)
        try:
            with backwards.made(), deferring(self._norms):
                output = checked.steps.train(
                    parts, run, backwards.run, reduction=checked.reduction, **checked.rules, seed=seed
                )
        except PartlySkippedError as error:
            if not backwards.can_be_dropped:
                raise
            self._warn_of_whole(error)
        else:
            self._backwards = backwards
            return output
        return run(batch)  # not while the error is handled, which holds what the parts have left

    def give_back_gradients(self) -> None:
        """Show the gradients that the last training step has made."""
        assert self._backwards is not None
        self._backwards.give_back()
        self._backwards = None

    def evaluate(self, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Run one validation, test or prediction step.

        Args:
            step: Lightning's step of the strategy.
            batch: of the step.
            others: what else the step takes.

        Returns:
            What the step would return for the full batch, in the order of its samples.
        """
        checked, run = self._check(step, batch, others), self._run(step, others)
        parts = self._parts(batch) if checked.verdict.ok else None
        if parts is None or len(parts.sizes) < 2:
            return run(batch)
        self._look(parts)
        return checked.steps.evaluate(parts, run, **checked.rules)

    def is_prepared(self, batch: Any) -> bool:
        """No batch is taken ahead of its turn."""
        return False

    def remove(self) -> None:
        """Let batch norms update their statistics as they come."""
        if self._norms is not None:
            self._norms.remove()

    def _parts(self, batch: Any, trains: bool = False) -> Parts:
        fewest = FEWEST_SAMPLES if trains and self._norms is not None and self._norms.has_any else 1
        try:
            return parts_of(self._trainer.lightning_module, batch, self._count, fewest=fewest)
        except UnsplittableBatchError as error:
            self._warn_of_whole(error)
            return Parts([batch], [1], [1.0])

    def _warn_of_whole(self, error: ValueError) -> None:
        if type(error) in self._warned_of:
            return
        self._warned_of.add(type(error))
        warnings.warn(
            f"This batch runs whole, and so will others like it, though the plan was made for batches that are split: "
            f"a step may need more memory than planned. The reason: {str(error).rstrip('.')}.",
            stacklevel=2,
        )

    def _run(self, step: Callable[..., Any], others: tuple[Any, ...]) -> Callable[[Any], Any]:
        def run(part: Any) -> Any:
            with self._glue():
                return step(part, *others)

        return run

    def _has_room(self) -> bool:
        strategy = self._trainer.strategy
        return has_room_for_two(strategy.plan, strategy.parallel_devices)

    def _check(self, step: Callable[..., Any], batch: Any, others: tuple[Any, ...]) -> _Checked:
        # The loaders of one hook may give batches of different kinds: the index comes after that of the batch.
        key = step.__name__, *others[1:]
        if key not in self._checked:
            trainer, logs = self._trainer, RecordedLogs(self._trainer.lightning_module)
            steps = PipelinedSteps(self._pipeline, logs)
            parts = self._parts(batch, trainer.training)
            if len(parts.sizes) < 2:  # which says nothing about the next one
                return _Checked(steps, Verdict(True))
            found = hooks_after_accumulation(trainer.lightning_module) if trainer.training else None
            if found is not None:  # set since the plan was made
                verdict = Verdict(False, found)
            else:
                portion = Portion.of(parts)
                del parts  # the test makes its own
                with Toggled(trainer.lightning_module) as toggled:
                    verdict = verdict_on(
                        trainer, step, batch, others, self._glue, has_room=self._has_room, portion=portion
                    )
                if verdict.ok and trainer.training and (reason := toggled.against(trainer.strategy.plan.schedule)):
                    verdict = Verdict(False, reason)
            if verdict.note:
                tell(trainer, verdict.note)
            self._checked[key] = _Checked(steps, verdict)
            if not verdict.ok and step.__name__ != "training_step":
                tell(trainer, f"`{step.__name__}` runs on whole batches: {verdict.reason.rstrip('.')}.")
        return self._checked[key]
