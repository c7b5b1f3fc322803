"""Steps of a trial without gradients: of validation, test and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from autobalance.profiling.trial import Batch, Glue, Mark
from autobalance.strategy.parts.pipelined import PipelinedSteps
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.trials.metrics import end_step_of_metrics
from autobalance.strategy.trials.twin import Twin, arguments

_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_BATCHES = 2  # the second is beside what the first has logged


def evaluate(twin: Twin, batch: Batch, glue: Glue, mark: Mark, *, trains: bool) -> None:
    """Run a loader of two batches to its end.

    Args:
        twin: a copy of the module.
        batch: both are like this one.
        glue: the context for the user's code.
        mark: told where each phase begins.
        trains: whether this is a validation in the midst of training.
    """
    module, name = twin.module, _STEPS[batch.kind]
    step = getattr(module, name)
    modes = {part: part.training for part in module.modules()}
    if trains:
        module.on_validation_model_zero_grad()
    twin.logged.begin(name, batch.loader)
    plugin = twin.precision_plugin
    context = plugin.predict_step_context if batch.kind == "predict" else plugin.val_step_context
    try:
        module.eval()
        for _ in range(_BATCHES):
            mark(f"{batch.name}: {name}")
            moved = twin.moved(batch)
            with _no_gradients(twin.real, batch.kind):
                _run_step(twin, batch, moved, partial(_evaluated, step, batch.loader, context, glue))
            twin.logged.end_batch()
            del moved
        twin.logged.end_epoch()
    finally:
        for part, mode in modes.items():
            part.training = mode


def _run_step(twin: Twin, batch: Batch, moved: Any, step: Callable[[Any], Any]) -> None:
    parts = twin.parts(batch, moved)
    if twin.pipeline is None or parts is None:
        step(moved)
    else:
        twin.test(batch, moved, parts, step)
        PipelinedSteps(twin.pipeline, RecordedLogs(twin.module)).evaluate(parts, step)
        end_step_of_metrics(twin.module)


def _evaluated(step: Callable[..., Any], loader: int, context: Callable[[], Any], glue: Glue, part: Any) -> Any:
    with context(), glue():
        return step(*arguments(step, part, loader))


@contextmanager
def _no_gradients(trainer: Any, kind: str) -> Iterator[None]:
    """As the loop that will run the step has it: within inference mode, the user's own `enable_grad` has no effect."""
    fits = trainer.state.fn == "fit"
    loop = trainer.fit_loop.epoch_loop.val_loop if fits else getattr(trainer, f"{kind}_loop")
    with torch.inference_mode() if loop.inference_mode else torch.no_grad():
        yield
