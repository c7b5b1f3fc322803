"""The test that precedes the first batch to be split: whether its parts give what it gives, in the user's own step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autobalance.execution.batches.merging import Rule
from autobalance.execution.batches.sample_layout import Layout
from autobalance.execution.equivalence.equivalence import Outcome, Verdict, equivalent
from autobalance.execution.equivalence.few_samples import MOST, FewSamples, Portion, few_samples
from autobalance.placement.contents import elements_in
from autobalance.strategy.parts.pipelined import loss_of, without_graph
from autobalance.strategy.parts.recorded_logs import RecordedLogs
from autobalance.strategy.parts.room_for_test import FEWEST
from autobalance.strategy.trials.metrics import is_metric
from autobalance.strategy.trials.stand_ins import Silent

_SPARE = 0.75
"""Share of a micro-batch's elements that leaves enough for what the test itself holds."""
_GRADIENTS_UNTESTED = (
    "A batch is split into parts of one or two samples. Two at once might need more memory with their gradients than "
    "is planned, so loss, outputs and logs of parts were compared with those of the whole, but gradients were not."
)
_UNTESTED = (
    "A batch is split into parts of one or two samples, and two at once might need more memory with their gradients "
    "than is planned. As the step does not run without them, it was not tested whether parts of a batch give what it "
    "gives."
)


def verdict_on(
    trainer: Any,
    step: Callable[..., Any],
    batch: Any,
    others: tuple[Any, ...],
    glue: Callable[[], AbstractContextManager[None]],
    layout: Layout | None = None,
    has_room: Callable[[], bool] = lambda: False,
    portion: Portion | None = None,
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
        has_room: asked after a backward of one sample, if that is all: whether two fit as well. If not, they are
            run without a graph, which holds less than one with it, and gradients are not compared.
        portion: how much of the batch a part of the run has, and so, how much the plan has memory for; None: any.

    Returns:
        The verdict; of a batch of one sample, that it may.
    """
    test = _Test(trainer, step, others, glue)
    # One less than a micro-batch has, for what the test itself holds. Of others in flight, stages hold little where
    # blocks run again or offload.
    most = MOST if portion is None else portion.samples - 1
    verdict = Verdict(True)
    for samples in (min(MOST, max(most, FEWEST)), FEWEST):
        few = few_samples(trainer.lightning_module, batch, layout, samples, portion)
        if few is None:
            return verdict
        if trainer.training and portion is not None and most < FEWEST and not _is_spare(few, portion):
            return _on_single_samples(test, few, has_room)
        verdict = test.on(few)
        if verdict.is_by_gradients:
            del few
            verdict = _of_others(
                test, few_samples(trainer.lightning_module, batch, layout, samples, portion, True), verdict
            )
        if not verdict.note:
            break
    return verdict


def _of_others(test: _Test, others: FewSamples | None, verdict: Verdict) -> Verdict:
    """The verdict of other samples where the gradients of some disagree, if there are others and they can be tested."""
    if others is None:
        return verdict
    other = test.on(others)
    return verdict if other.note else other


def _is_spare(few: FewSamples, portion: Portion) -> bool:
    """Whether samples that nobody counts are clearly less than a micro-batch."""
    return elements_in(few.whole) <= _SPARE * portion.elements


def _on_single_samples(test: _Test, few: FewSamples, has_room: Callable[[], bool]) -> Verdict:
    test.on(FewSamples(few.parts[0], few.parts[:1], few.sizes[:1]))
    if has_room():
        return test.on(few)
    test.goes_back = False
    verdict = test.on(few)
    if test.has_raised:
        return Verdict(True, note=_UNTESTED)
    return replace(verdict, note=_GRADIENTS_UNTESTED) if verdict.ok and not verdict.note else verdict


class _Test:
    """Runs a step on samples; `goes_back` says whether gradients are compared, too."""

    def __init__(
        self,
        trainer: Any,
        step: Callable[..., Any],
        others: tuple[Any, ...],
        glue: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.goes_back: bool = trainer.training
        self.has_raised = False
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._step = step
        self._others = others
        self._glue = glue
        self._logs = RecordedLogs(self._module)

    def on(self, few: FewSamples) -> Verdict:
        """The verdict of these samples."""
        self.has_raised = False
        backward = self._backward if self.goes_back else None
        with silence(self._trainer, self._module):
            return equivalent(self._run, few, self._module, backward, str(self._trainer.precision), skip=is_metric)

    def _run(self, part: Any) -> Outcome:
        without = self._trainer.training and not self.goes_back
        with self._logs.recording(), self._glue(), torch.no_grad() if without else nullcontext():
            try:
                output = self._step(part, *self._others)
            except RuntimeError:
                self.has_raised = True
                raise
        loss = loss_of(output) if self._trainer.training else None
        if loss is not None:
            output = {key: value for key, value in output.items() if key != "loss"} if _has_more(output) else None
        return Outcome(loss, without_graph(output), _values(self._logs))

    def _backward(self, loss: Tensor) -> None:
        with self._glue():
            self._module.backward(loss)


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
def silence(trainer: Any, module: Any) -> Iterator[None]:
    """Let what a step writes to loggers itself, or prints by `self.print`, go nowhere.

    Args:
        trainer: in a run.
        module: its LightningModule.
    """
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
