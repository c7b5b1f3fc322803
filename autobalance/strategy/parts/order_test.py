"""The test that precedes the first batches to overlap: whether one sees what another has left in the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from autobalance.execution.equivalence.carried_over import carried_over
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.parts.self_test import silence
from autobalance.strategy.trials.metrics import is_metric

Glue = Callable[[], AbstractContextManager[None]]


def reason_for_order(
    trainer: Any, step: Callable[..., Any], batches: Sequence[tuple[Any, ...]], glue: Glue
) -> str | None:
    """Why batches must run one after the other: their steps change the module, from one to the next.

    Forwards alone are run, without a graph unless the step asks for one, so that it takes less memory than the step of
    one batch. Nothing reaches loggers, metrics or the terminal meanwhile, and afterwards all is as it was.

    Example:
        >>> reason_for_order(trainer, step, [(first, 0), (second, 1)], strategy.glue)      # doctest: +SKIP
        'the step changes `losses` of the module from batch to batch, ...'

    Args:
        trainer: in `fit`, its model placed.
        step: Lightning's training step of the strategy.
        batches: two of them, each with what else the step takes.
        glue: the context for the user's code.

    Returns:
        The reason in words; None if there is none, and where a step raises: that is for the user to see in the run.
    """
    module = trainer.lightning_module
    logs = RecordedLogs(module)

    def run(without: bool, arguments: tuple[Any, ...]) -> None:
        with logs.recording(), glue(), torch.no_grad() if without else nullcontext():
            step(*arguments)

    for step_of in (partial(run, True), partial(run, False)):
        try:
            with silence(trainer, module):
                changed = carried_over(step_of, batches, module, is_metric)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # without a graph, as a step that needs gradients; with one, as in the run
            continue
        return None if changed is None else _in_words(changed)
    return None


def _in_words(changed: str) -> str:
    return (
        f"the step changes `{changed}` of the module from batch to batch, and batches that flow together would find it "
        f"in another order. What is collected over batches belongs into a callback or a metric, or is returned"
    )
