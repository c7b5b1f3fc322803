"""The test that precedes the first batch to be split: whether its parts give what it gives, in the user's own step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from autobalance.execution.equivalence import Outcome, Verdict, equivalent
from autobalance.execution.few_samples import few_samples
from autobalance.execution.merging import Rule
from autobalance.execution.sample_layout import Layout
from autobalance.strategy.metrics import is_metric
from autobalance.strategy.pipelined import loss_of, without_graph
from autobalance.strategy.recorded_logs import RecordedLogs
from autobalance.strategy.stand_ins import Silent

_FEWEST = 2


def verdict_on(
    trainer: Any,
    step: Callable[..., Any],
    batch: Any,
    others: tuple[Any, ...],
    glue: Callable[[], AbstractContextManager[None]],
    layout: Layout | None = None,
) -> Verdict:
    """Whether the Trainer's present step may run on parts of a batch.

    Nothing reaches loggers, metrics or the terminal meanwhile, and afterwards all is as it was.

    Example:
        >>> verdict = verdict_on(trainer, step, batch, (0,), strategy.glue)      # doctest: +SKIP
        >>> verdict.ok, verdict.reason
        (False, 'the loss couples the samples of a batch: it is 1.61 for 5 of them at once, ...')

    Args:
        trainer: in a run, its model placed.
        step: Lightning's step of the strategy.
        batch: the first one.
        others: what else the step takes.
        glue: the context for the user's code.
        layout: where the batch has its samples.

    Returns:
        The verdict; of a batch of one sample, that it may.
    """
    module = trainer.lightning_module
    trains = trainer.training
    logs = RecordedLogs(module)

    def run(part: Any) -> Outcome:
        with logs.recording(), glue():
            output = step(part, *others)
        loss = loss_of(output) if trains else None
        if loss is not None:
            output = {key: value for key, value in output.items() if key != "loss"} if _has_more(output) else None
        return Outcome(loss, without_graph(output), _values(logs))

    def backward(loss: Tensor) -> None:
        with glue():
            module.backward(loss)

    verdict = Verdict(True)
    for most in (5, _FEWEST):
        few = few_samples(module, batch, layout, most)
        if few is None:
            return Verdict(True)
        with _silence(trainer, module):
            precision = str(trainer.precision)
            verdict = equivalent(run, few, module, backward if trains else None, precision, skip=is_metric)
        if not verdict.note:
            break
    return verdict


def log_rules(verdict: Verdict) -> Mapping[str, Rule]:
    """How `RecordedLogs` is to merge what a step logs, by name.

    Args:
        verdict: on that step.
    """
    rules = verdict.log_rules or {}
    return {place[2:-2]: rule for place, rule in rules.items() if place.startswith("['") and place.endswith("']")}


def _has_more(output: Any) -> bool:
    return isinstance(output, Mapping)


def _values(logs: RecordedLogs) -> dict[str, Any] | None:
    """What was logged, but for what metrics know best how to merge."""
    found: dict[str, Any] = {}
    counts = Counter[str]()
    for call in logs.calls:
        counts[call.name] += 1
        if call.origin is None and not is_metric(call.value):
            name = call.name if counts[call.name] == 1 else f"{call.name} ({counts[call.name]})"
            found[name] = call.value
    return found or None


@contextmanager
def _silence(trainer: Any, module: Any) -> Iterator[None]:
    """Let what a step writes to loggers itself, or prints by `self.print`, go nowhere."""
    loggers, printing = trainer.loggers, vars(module).get("print")
    if loggers:
        trainer.loggers = [Silent()]
    vars(module)["print"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        trainer.loggers = loggers
        del vars(module)["print"]
        if printing is not None:
            vars(module)["print"] = printing
