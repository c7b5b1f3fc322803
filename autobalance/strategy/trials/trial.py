"""Lightning's part of a trial: the step runs on a copy of the module as the Trainer would run it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autobalance import compat
from autobalance.compat import gradient_hooks
from autobalance.execution.batch_norm import FEWEST_SAMPLES, DeferredBatchNorm, deferring, install_deferred
from autobalance.execution.batches.splitting import Parts, parts_of
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.running import Running
from autobalance.profiling.trial import Batch, Glue, Mark
from autobalance.strategy.gradients import frees_gradients_early, sees_gradients_before_backward
from autobalance.strategy.optimizers import refuse_gathering
from autobalance.strategy.parts.early_gradients import EarlyGradients
from autobalance.strategy.parts.pipelined import PipelinedSteps, backward_of_part
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.parts.room_for_test import FEWEST, run_forward_of_two
from autobalance.strategy.registration import lightning_root, overrides
from autobalance.strategy.trials.logged import LoggedValues
from autobalance.strategy.trials.metrics import end_step_of_metrics, is_metric, stand_in_for_metric
from autobalance.strategy.trials.stand_ins import TrialTrainer

STEPS = 2  # optimizer state exists only from the second step on
MICRO_STEPS = 2  # of accumulation: gradients exist only from the second on


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
        self._logged: Any = None
        self._training_batch: Batch | None = None
        self._device = torch.device("cpu")
        self._pipeline: Pipeline | None = None
        self._norms: DeferredBatchNorm | None = None
        self._micro_batches = 1

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
        self._pipeline, self._micro_batches = pipeline, running.micro_batches
        options = getattr(self._trainer.strategy, "options", None)
        if options is not None and options.batch_norm == "deferred" and not self.takes_windows:
            self._norms = install_deferred(self._stand_in.lightning_module)

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
        self._device = device
        self._pipeline, self._micro_batches, self._norms = None, 1, None
        self._logged = LoggedValues(self._package, device)
        # Its `log_dict` calls `log`, and so whatever takes the place of that while micro-batches run.
        twin.__dict__.update(log=self._logged.log, print=_say_nothing)
        compat.set_lightning_device(twin, device)
        for module in twin.modules():
            if is_metric(module) or hasattr(module, "placeholder_device"):
                module.to(device)
        trainer = self._stand_in
        trainer.begin(twin, device)
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
        self._stand_in.strategy.glue, self._stand_in.strategy.mark = glue, mark
        repeats = self._trainer.max_epochs != 1
        if batch.kind == "train":
            self._training_batch = batch
            for number in range(1, STEPS + 1):
                self._train(twin, batch, glue, mark, number)
                if number == 1 and repeats:
                    self._logged.end_epoch()
            return
        self._evaluate(twin, batch, glue, mark)
        if self._training_batch is not None and self._trains_after_validation() and self._logged.has_evaluated:
            # Each is beside what the other has logged, but of a check before training Lightning forgets the values.
            if not self._validates_again():
                self._logged.forget()
            self._train(twin, self._training_batch, glue, mark, STEPS + 1)
            if not frees_gradients_early(self._trainer):  # validation has freed those that the next step stands on
                self._train(twin, self._training_batch, glue, mark, STEPS + 2)
            self._evaluate(twin, batch, glue, mark)

    def _trains_after_validation(self) -> bool:
        return bool(self._validates_again() or self._trainer.num_sanity_val_steps > 0)

    def _validates_again(self) -> bool:
        """Whether training goes on after a validation: in later epochs, or in the midst of the only one."""
        return bool(self._trainer.max_epochs != 1 or self._trainer.val_check_interval != 1.0)

    def _train(self, twin: Any, batch: Batch, glue: Glue, mark: Mark, number: int) -> None:
        if twin.automatic_optimization:
            self._train_automatically(twin, batch, glue, mark, number)
        else:
            self._stand_in.strategy.begin_manual_step(number)
            self._training_step(twin, self._transferred(twin, batch), glue)
            self._logged.end_batch()

    def _train_automatically(self, twin: Any, batch: Batch, glue: Glue, mark: Mark, number: int) -> None:
        strategy = self._stand_in.strategy
        if not strategy.optimizers:
            return
        accumulate = self.window
        micro_steps = 1 if self.takes_windows else min(accumulate, MICRO_STEPS)
        drops_early = frees_gradients_early(self._trainer)
        for micro_step in range(micro_steps):
            moved = self._moved(twin, batch)
            if drops_early and micro_step == 0:
                strategy.optimizers[0].zero_grad()
            mark(f"step {number} forward")
            closure = self._closure(twin, moved, glue, mark, number, micro_step, accumulate)
            if micro_step == micro_steps - 1:
                with glue() if self._steps_by_hand(twin) else nullcontext():
                    twin.optimizer_step(0, 0, strategy._lightning_optimizers[0], closure)
            else:
                closure()
            result = closure.consume_result()
            self._logged.end_batch()
            del moved, closure, result

    def _steps_by_hand(self, twin: Any) -> bool:
        """Whether the user's own code takes optimizer steps; Lightning's touches nothing on several devices."""
        return overrides(twin, "optimizer_step")

    def _closure(
        self, twin: Any, moved: Any, glue: Glue, mark: Mark, number: int, micro_step: int, accumulate: int
    ) -> Any:
        closure_class, result_class = compat.closure_classes(self._package)
        strategy = self._stand_in.strategy
        optimizer = strategy.optimizers[0]

        def step() -> Any:
            if self._pipeline is None:
                output = self._training_step(twin, moved, glue)
            else:
                # The first step is there for the optimizer's state, on top of which the second holds all the rest.
                most = 1 if number == 1 else None
                output = self._step_in_parts(twin, moved, glue, micro_step == 0, accumulate, most)
            return result_class.from_training_step_output(output, accumulate)

        def zero_grad() -> None:
            with glue():
                twin.on_before_zero_grad(optimizer)
                twin.optimizer_zero_grad(0, 0, optimizer)

        def backward(loss: torch.Tensor) -> None:
            mark(f"step {number} backward")
            strategy.backward(loss, optimizer)
            mark(f"step {number} optimizer")

        return closure_class(step_fn=step, backward_fn=backward, zero_grad_fn=None if micro_step else zero_grad)

    def _training_step(self, twin: Any, moved: Any, glue: Glue) -> Any:
        self._logged.begin("training_step", 0)
        return self._step_on(twin, glue, moved)

    def _step_on(self, twin: Any, glue: Glue, part: Any) -> Any:
        with self._stand_in.precision_plugin.train_step_context(), glue():
            return twin.training_step(*_arguments(twin.training_step, part, 0))

    def _moved(self, twin: Any, batch: Batch) -> Any:
        """The batch on the root device; of a window all batches, as a list."""
        if self._pipeline is None or not self.takes_windows:
            return self._transferred(twin, batch)
        return [self._transferred(twin, batch) for _ in range(self._micro_batches)]

    def _step_in_parts(
        self, twin: Any, moved: Any, glue: Glue, is_first: bool, accumulate: int, most: int | None
    ) -> Any:
        """A training step with its backwards, as `MicroBatchedSteps` runs it, or `AccumulatedSteps` a window."""
        assert self._pipeline is not None
        fewest = FEWEST_SAMPLES if self._norms is not None and self._norms.has_any else 1
        parts = None if self.takes_windows else parts_of(twin, moved, self._micro_batches, fewest=fewest)
        if parts is not None and len(parts.sizes) < 2:
            return self._training_step(twin, moved, glue)
        strategy = self._stand_in.strategy
        optimizer = strategy.optimizers[0]

        def backward(loss: torch.Tensor) -> None:
            with glue():
                backward_of_part(self._stand_in.precision_plugin, loss / accumulate, twin, optimizer)

        self._logged.begin("training_step", 0)
        are_seen = sees_gradients_before_backward(self._trainer)
        hooks = [[_leave_gradient for _ in gradient_hooks(own)] for own in self._trainer.lightning_module.parameters()]
        early = EarlyGradients(twin.parameters(), is_first, are_seen, hooks)
        logs = RecordedLogs(twin)
        steps, step = PipelinedSteps(self._pipeline, logs), partial(self._step_on, twin, glue)
        if parts is not None:
            if most is not None:
                self._test_parts(twin, moved, parts, step)
            parts = Parts(parts.batches[:most], parts.sizes[:most], parts.weights[:most])
            with deferring(self._norms):
                output = steps.train(parts, step, backward)
        else:
            *_, output = steps.train_each(moved[:most], step, backward)
            for number in range(len(moved[:most])):
                logs.replay_one(number)
        end_step_of_metrics(twin)
        early.set_aside()
        strategy.early = early
        return output

    def _evaluate(self, twin: Any, batch: Batch, glue: Glue, mark: Mark) -> None:
        name = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[batch.kind]
        step = getattr(twin, name)
        modes = {module: module.training for module in twin.modules()}
        if self._training_batch is not None:
            twin.on_validation_model_zero_grad()
        self._logged.begin(name, batch.loader)
        plugin = self._stand_in.precision_plugin
        context = plugin.predict_step_context if batch.kind == "predict" else plugin.val_step_context
        try:
            twin.eval()
            for _ in range(2):  # the second batch is beside what the first has logged
                mark(f"{batch.name}: {name}")
                moved = self._transferred(twin, batch)
                with _no_gradients(self._trainer):
                    self._evaluation_step(twin, moved, partial(_evaluated, step, batch.loader, context, glue))
                self._logged.end_batch()
                del moved
            self._logged.end_epoch()
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _evaluation_step(self, twin: Any, moved: Any, step: Callable[[Any], Any]) -> None:
        is_whole = self._pipeline is None or self.takes_windows
        parts = None if is_whole else parts_of(twin, moved, self._micro_batches)
        if self._pipeline is None or parts is None or len(parts.sizes) < 2:
            step(moved)
        else:
            self._test_parts(twin, moved, parts, step)
            PipelinedSteps(self._pipeline, RecordedLogs(twin)).evaluate(parts, step)
            end_step_of_metrics(twin)

    def _test_parts(self, twin: nn.Module, moved: Any, parts: Parts, step: Callable[[Any], Any]) -> None:
        """What the test before a first batch needs where it takes more samples than a micro-batch has."""
        if max(parts.sizes) < FEWEST:
            with RecordedLogs(twin).recording():
                run_forward_of_two(twin, moved, step)

    def _transferred(self, twin: nn.Module, batch: Batch) -> Any:
        data = self._stand_in.precision_plugin.convert_input(batch.data)
        return compat.transferred_batch(twin, data, self._device, batch.loader)


def _evaluated(step: Callable[..., Any], loader: int, context: Callable[[], Any], glue: Glue, part: Any) -> Any:
    with context(), glue():
        return step(*_arguments(step, part, loader))


def _leave_gradient(gradient: torch.Tensor) -> None:
    """Stands for the user's hooks on parameters."""


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `print`."""


def _arguments(step: Callable[..., Any], batch: Any, loader: int) -> tuple[Any, ...]:
    """The arguments that Lightning would pass: batch, and batch and loader index if the step takes them."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return batch, 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (batch, 0, loader)[: len(positional)]


@contextmanager
def _no_gradients(trainer: Any) -> Iterator[None]:
    inference = bool(getattr(trainer, "_inference_mode", True))
    with torch.inference_mode() if inference else torch.no_grad():
        yield
