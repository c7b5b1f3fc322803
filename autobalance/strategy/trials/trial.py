"""Lightning's part of a trial: the step runs on a copy of the module as the Trainer would run it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autobalance import compat
from autobalance.execution.batch_norm import install_deferred
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.running import Running
from autobalance.profiling.trial import Batch, Glue, Mark
from autobalance.strategy.gradients import frees_gradients_early
from autobalance.strategy.optimizers import refuse_gathering
from autobalance.strategy.registration import lightning_root
from autobalance.strategy.trials.evaluation import evaluate
from autobalance.strategy.trials.logged import LoggedValues
from autobalance.strategy.trials.metrics import is_metric, stand_in_for_metric
from autobalance.strategy.trials.stand_ins import TrialTrainer
from autobalance.strategy.trials.training import TrialTraining
from autobalance.strategy.trials.twin import Twin

STEPS = 2  # optimizer state exists only from the second step on


class LightningTrial:
    """Runs `training_step`, `validation_step`, ... of a copy with the Trainer's precision, clipping and accumulation.

    Args:
        trainer: the Trainer; nothing of it is changed.

    Attributes:
        takes_windows: whether the batches whose gradients are added up are one step, as its micro-batches.
    """

    takes_windows = False

    def __init__(self, trainer: Any) -> None:
        package = lightning_root(trainer)
        assert package is not None
        self.precision = str(trainer.precision)
        self.dtype: torch.dtype | None = None  # Lightning has cast the module by now
        self._package = package
        self._trainer = trainer
        self._stand_in: Any = None
        self._twin: Twin | None = None
        self._training_batch: Batch | None = None

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those of the last copy."""
        return () if self._stand_in is None else list(self._stand_in.optimizers)

    @property
    def window(self) -> int:
        """The most batches whose gradients are added up, now or when `GradientAccumulationScheduler` says so."""
        schedules = (getattr(callback, "scheduling", None) for callback in self._trainer.callbacks)
        later = [most for schedule in schedules if isinstance(schedule, dict) for most in schedule.values()]
        return int(max(self._trainer.accumulate_grad_batches, *later, 1))

    def split(self, pipeline: Pipeline, running: Running) -> None:
        """From now on run micro-batches as the run will."""
        assert self._twin is not None
        self._twin.pipeline, self._twin.micro_batches = pipeline, running.micro_batches
        options = getattr(self._trainer.strategy, "options", None)
        if options is not None and options.batch_norm == "deferred" and not self.takes_windows:
            self._twin.norms = install_deferred(self._twin.module)

    def stand_ins(self, root: nn.Module, kind: str) -> Mapping[int, Any]:
        """The copy gets a Trainer of its own; its metrics only keep their bytes, unless elements are real."""
        self._stand_in = TrialTrainer(self._trainer, self._package)
        instead: dict[int, Any] = {id(self._trainer): self._stand_in}
        for module in root.modules():
            if is_metric(module) and id(module) not in instead:
                stand_in = copy.deepcopy(module) if kind == "real" else stand_in_for_metric(module)
                instead |= dict(zip(map(id, module.modules()), stand_in.modules(), strict=False))
                instead[id(module)] = stand_in
        return instead

    def prepare(self, twin: nn.Module, device: torch.device) -> Sequence[torch.optim.Optimizer]:
        """Give the copy silent logging, its own precision plugin and optimizers."""
        logged = LoggedValues(self._package, device)
        # Its `log_dict` calls `log`, and so whatever takes the place of that while micro-batches run.
        twin.__dict__.update(log=logged.log, print=_say_nothing)
        compat.set_lightning_device(twin, device)
        for module in twin.modules():
            if is_metric(module) or hasattr(module, "placeholder_device"):
                module.to(device)
        trainer = self._stand_in
        trainer.begin(twin, device)
        self._twin = Twin(twin, self._trainer, trainer, logged, device, self.takes_windows)
        if self._trainer.state.fn != "fit":
            return ()
        with compat.loader_attachment_kept(self._trainer):
            optimizers, schedulers = compat.configured_optimizers(self._package, twin)
        if self._trainer.num_devices > 1:
            refuse_gathering(optimizers)
        trainer.strategy.take_optimizers(optimizers, schedulers)
        return list(optimizers)

    def run(self, twin: nn.Module, batch: Batch, glue: Glue, mark: Mark) -> None:
        """Two optimizer steps with a training batch, one step without gradients with any other."""
        copied = self._twin
        assert copied is not None
        self._stand_in.strategy.glue, self._stand_in.strategy.mark = glue, mark
        training = TrialTraining(copied, self._package, self.window, glue, mark)
        if batch.kind == "train":
            self._training_batch = batch
            for number in range(1, STEPS + 1):
                training.run(batch, number)
                if number == 1 and self._trainer.max_epochs != 1:
                    copied.logged.end_epoch()
            return
        before = self._training_batch
        evaluate(copied, batch, glue, mark, trains=before is not None)
        if before is not None and self._trains_after_validation() and copied.logged.has_evaluated:
            # Each is beside what the other has logged, but of a check before training Lightning forgets the values.
            if not self._validates_again():
                copied.logged.forget()
            training.run(before, STEPS + 1)
            if not frees_gradients_early(self._trainer):  # validation has freed those that the next step stands on
                training.run(before, STEPS + 2)
            evaluate(copied, batch, glue, mark, trains=True)

    def _trains_after_validation(self) -> bool:
        return bool(self._validates_again() or self._trainer.num_sanity_val_steps > 0)

    def _validates_again(self) -> bool:
        """Whether training goes on after a validation: in later epochs, or in the midst of the only one."""
        return bool(self._trainer.max_epochs != 1 or self._trainer.val_check_interval != 1.0)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `print`."""
