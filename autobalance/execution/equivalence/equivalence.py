"""Whether parts of a batch give what the batch gives: tried on a few real samples before a batch is first split.

Random numbers are held constant meanwhile, and afterwards everything is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autobalance.compat import gradient_hooks_off, is_batch_norm
from autobalance.execution.batches.merge_rules import Mismatch, learn
from autobalance.execution.batches.merging import Rules
from autobalance.execution.equivalence.comparison import Closeness, Comparison, Results
from autobalance.execution.equivalence.constant_random import constant_random
from autobalance.execution.equivalence.few_samples import FewSamples
from autobalance.execution.equivalence.gradient_sketch import Sketch, sketching
from autobalance.execution.equivalence.module_state import Copied, ModuleState, Reading, first_difference
from autobalance.execution.equivalence.writes_kept import WritesKept
from autobalance.profiling.sandbox import random_state_kept


class Outcome(NamedTuple):
    """What one run of the user's step gives.

    Attributes:
        loss: of a training step; None if it skips the batch, or is no training step.
        output: what it returns, without the loss.
        logged: values by name.
    """

    loss: Tensor | None
    output: Any = None
    logged: Any = None


Step = Callable[[Any], Outcome]
"""Runs the user's step on a batch, or on a part of one."""


@dataclass(frozen=True)
class Verdict:
    """Whether a step may run on parts of a batch.

    Example:
        >>> Verdict(ok=False, reason="the loss couples the samples of a batch: ...")

    Attributes:
        ok: whether it may.
        reason: why not, in words.
        loss_rule: "mean" if the loss is a mean over samples, "sum" if a sum, "weights" if the user's `loss_weight`
            says what each part weighs.
        output_rules: how to merge what the step returns beside the loss, by place; without places where it is the same
            in all parts.
        log_rules: how to merge what it logs, in the same way.
        note: what could not be tested, in words.
        is_by_gradients: whether gradients alone are why not: a value next to the kink of a `relu` may fall on either
            side, as sums are ordered, and then others than those samples tell.
    """

    ok: bool
    reason: str = ""
    loss_rule: str = "mean"
    output_rules: Rules | None = None
    log_rules: Rules | None = None
    note: str = ""
    is_by_gradients: bool = False


def equivalent(
    step: Step,
    few: FewSamples,
    module: nn.Module,
    backward: Callable[[Tensor], None] | None = None,
    precision: str = "32-true",
    skip: Callable[[nn.Module], bool] = lambda module: False,
) -> Verdict:
    """Run a step on a few samples at once and in parts, and compare all that can be compared.

    These are the loss, each parameter's gradient, what the step returns and logs, and the state of the module: what
    it appends, counts or averages. Batch norms in training run on their running statistics meanwhile. Gradients,
    numbers in tensors, attributes, containers and random states are put back.

    Example:
        >>> few = few_samples(module, batch)                                            # doctest: +SKIP
        >>> equivalent(lambda part: Outcome(module.training_step(part, 0)), few, module, Tensor.backward).ok
        True

    Args:
        step: runs the user's step in this thread.
        few: the samples.
        module: the model, placed.
        backward: runs a backward of a loss; None for a step without gradients.
        precision: Lightning's name of it, such as "bf16-mixed"; how close is close enough depends on it.
        skip: modules whose state is merged by rules of its own, such as metrics.

    Returns:
        The verdict. An error that the step raises is a reason as well; that memory does not suffice for a few samples
        at once says nothing, and is noted.
    """
    close = Closeness.of(precision, module)
    try:
        with random_state_kept(), _gradients_set_aside(module), batch_norms_at_rest(module):
            runs = _Runs(step, few, module, backward, skip)
            whole = runs.run([few.whole])
            parts = runs.run(few.parts)
            changed = _changed(whole, parts, close)
            if changed is None and runs.unmoved:
                with _moved(runs.unmoved):
                    changed = _changed(runs.run([few.whole]), runs.run(few.parts), close)
    except torch.OutOfMemoryError:
        return Verdict(
            True,
            note=f"Whether parts of a batch give what the batch gives could not be tested: {sum(few.sizes)} samples at "
            f"once need more memory than there is.",
        )
    except Exception as error:
        return Verdict(False, f"a test of the step on {few} raised {type(error).__name__}: {error}")
    if changed is not None:
        return Verdict(
            False,
            f"the step changes `{changed}` of the module, which then is not the same for {few}. What is collected over "
            f"batches belongs into a callback or a metric, or is returned",
        )
    return _judge(whole, parts, few, close)


class _Runs:
    """Runs the step from the same state each time."""

    def __init__(
        self,
        step: Step,
        few: FewSamples,
        module: nn.Module,
        backward: Callable[[Tensor], None] | None,
        skip: Callable[[nn.Module], bool],
    ) -> None:
        self._step = step
        self._module = module
        self._backward = backward
        self._state = ModuleState(module, skip, beside=(few.whole, *few.parts))
        self._kept = WritesKept(self._state.tensors)
        self._unmoved: dict[int, Tensor] = {}

    @property
    def unmoved(self) -> list[Tensor]:
        """What the step writes to without a change: a teacher that is a copy as yet stays where it is, however often
        it follows."""
        return list(self._unmoved.values())

    def run(self, batches: Sequence[Any]) -> _Run:
        try:
            results = [self._run_one(batch) for batch in batches]
            reading = self._state.reading(self._kept.has_changed, self._kept.before)
            self._unmoved.update((id(tensor), tensor) for tensor in self._kept.changed if self._is_unmoved(tensor))
        finally:
            self._state.put_back()
            self._kept.put_back()
        return _Run([outcome for outcome, _ in results], [gradients for _, gradients in results], reading)

    def _is_unmoved(self, tensor: Tensor) -> bool:
        before = self._kept.before(tensor)
        return before is not None and tensor.is_floating_point() and not Copied(tensor.cpu(), before.cpu()).has_moved

    def _run_one(self, batch: Any) -> tuple[Outcome, dict[str, Sketch]]:
        with self._kept, sketching(self._module) as gradients, constant_random():
            outcome = self._step(batch)
            if outcome.loss is not None and self._backward is not None:
                self._backward(outcome.loss)
        return outcome._replace(loss=None if outcome.loss is None else outcome.loss.detach()), gradients


@dataclass(frozen=True)
class _Run:
    """What the step gave for each batch of a run, sketches of its gradients, and the module's state after all."""

    outcomes: Sequence[Outcome]
    gradients: Sequence[dict[str, Sketch]]
    reading: Reading

    @property
    def has_loss(self) -> bool:
        return any(outcome.loss is not None for outcome in self.outcomes)

    def results(self) -> Results:
        """Losses as numbers: one that is missing is none."""
        losses = [nan if outcome.loss is None else float(outcome.loss) for outcome in self.outcomes]
        return Results(losses, self.gradients)


def _changed(whole: _Run, parts: _Run, close: Closeness) -> str | None:
    """What of the module is not the same after the whole and after its parts."""
    return first_difference(whole.reading, parts.reading, close.gradient)


@contextmanager
def _moved(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Give tensors other numbers for a while, none of which changes its sign."""
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(1.25).add_(0.01 * tensor.sign() + 0.01 * (tensor == 0))
        yield
    finally:
        with torch.no_grad():
            for tensor, numbers in zip(reversed(tensors), reversed(kept), strict=True):
                tensor.copy_(numbers)


def _judge(whole: _Run, parts: _Run, few: FewSamples, close: Closeness) -> Verdict:
    rule = "mean"
    if whole.has_loss or parts.has_loss:
        comparison = Comparison(whole.results(), parts.results(), few, close)
        found = comparison.rule()
        if found is None:
            return Verdict(False, comparison.reason(), is_by_gradients=comparison.is_same_but_for_gradients)
        rule = found
    outcomes = (*whole.outcomes, *parts.outcomes)
    outputs = _learned([outcome.output for outcome in outcomes], few, close)
    logs = _learned([outcome.logged for outcome in outcomes], few, close)
    for what, learned in (("returns", outputs), ("logs", logs)):
        if isinstance(learned, Mismatch):
            where = f" at {learned.name}" if learned.name else ""
            return Verdict(False, f"what the step {what}{where} couples the samples of a batch: {learned.reason}")
    return Verdict(True, loss_rule=rule, output_rules=_known(outputs), log_rules=_known(logs))


def _learned(values: Sequence[Any], few: FewSamples, close: Closeness) -> Rules | Mismatch | None:
    """How to merge what the parts give; None where there is nothing."""
    whole, *parts = values
    if all(value is None for value in values):
        return None
    return learn(whole, parts, few.sizes, few.weights, tolerance=close.gradient)


def _known(learned: Rules | Mismatch | None) -> Rules | None:
    """The rules that hold for other batches, too: what is the same in a few samples may differ in others."""
    if learned is None or isinstance(learned, Mismatch):
        return None
    return {place: rule for place, rule in learned.items() if rule.kind != "equal"}


@contextmanager
def _gradients_set_aside(module: nn.Module) -> Iterator[None]:
    """The very gradients that are there come back."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        with gradient_hooks_off([parameter for parameter, _ in kept]):  # the run calls them once for a whole batch
            yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def batch_norms_at_rest(module: nn.Module) -> Iterator[None]:
    """Batch norms use their running statistics: what else couples samples is to be found.

    Args:
        module: the model.
    """
    training = [each for each in module.modules() if is_batch_norm(each) and each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True
