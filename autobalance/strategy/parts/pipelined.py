"""The user's steps in micro-batches: each part of a batch goes through the user's own step, and results are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from autobalance.execution.batches.merge_rules import guess
from autobalance.execution.batches.merging import Rules, UnmergeableError, counted, merge
from autobalance.execution.batches.splitting import Parts, weights
from autobalance.execution.pipeline import Pipeline
from autobalance.placement.contents import tensors_in
from autobalance.placement.ready import ready

Step = Callable[[Any], Any]
"""Runs the user's step on one part of a batch and returns what it returns."""


class PartlySkippedError(UnmergeableError):
    """A training step returned no loss for some parts of a batch, and one for others.

    Example:
        >>> steps.train(parts, step=lambda part: None if part.isnan().any() else part.sum(), backward=Tensor.backward)
        PartlySkippedError: `training_step` returned no loss for micro-batch 2 of 4, but one for others: ...
    """


class Logs(Protocol):
    """Takes what micro-batches log, each by itself."""

    def recording(self) -> AbstractContextManager[None]:
        """While it lasts, `self.log` and metrics keep what each micro-batch gives."""

    def replay(self, sizes: Sequence[int], weights: Sequence[float | Tensor], rules: Rules | None = None) -> None:
        """Log it as the full batch would have.

        Args:
            sizes: samples of each micro-batch.
            weights: by which means over samples are weighted.
            rules: how to merge what is logged, by name, where it is known.
        """

    def drop(self) -> None:
        """Forget it."""


class PipelinedSteps:
    """Runs steps in micro-batches and gives back what the full batch would have given.

    Example:
        >>> steps = PipelinedSteps(pipeline, logs)                                        # doctest: +SKIP
        >>> output = steps.train(parts, step=module.training_step, backward=Tensor.backward)   # doctest: +SKIP

    Args:
        pipeline: runs them in the order of the plan's schedule.
        logs: takes what they log.
    """

    def __init__(self, pipeline: Pipeline, logs: Logs) -> None:
        self._pipeline = pipeline
        self._logs = logs

    def train(
        self,
        parts: Parts,
        step: Step,
        backward: Callable[[Tensor], None],
        *,
        reduction: str = "mean",
        rules: Rules | None = None,
        log_rules: Rules | None = None,
        seed: int | None = None,
    ) -> Any:
        """Run forwards and backwards of all parts.

        Args:
            parts: of the batch.
            step: the user's training step.
            backward: runs the backward of the loss that it is given, which is weighted.
            reduction: "mean" weighs losses by the parts' weights, "sum" adds them up.
            rules: how to merge what steps return beside the loss, where it is known.
            log_rules: how to merge what they log, by name, where it is known.
            seed: of the step's random numbers.

        Returns:
            What the step would return for the full batch; its loss has no graph. None where no part has a loss.

        Raises:
            PartlySkippedError: some parts have a loss and others have none.
        """
        shares = parts.weights
        if reduction != "mean":
            shares = weights(parts.batches, parts.sizes, reduction=reduction)
        with self._logs.recording():
            outputs = self._outputs(parts.batches, shares, step, backward, seed)
        try:
            _refuse_missing(outputs)
        except PartlySkippedError:
            self._logs.drop()
            raise
        self._logs.replay(parts.sizes, parts.weights, log_rules)
        return _merged_step(outputs, parts.sizes, shares, rules)

    def train_each(
        self, batches: Sequence[Any], step: Step, backward: Callable[[Tensor], None], seed: int | None = None
    ) -> list[Any]:
        """Run forwards and backwards of whole batches, whose losses add up.

        Args:
            batches: of one optimizer step.
            step: the user's training step.
            backward: runs the backward of the loss that it is given.
            seed: of the step's random numbers.

        Returns:
            What each step returned, its loss without a graph; what it logged waits to be replayed.
        """
        with self._logs.recording():
            return self._outputs(batches, [1.0] * len(batches), step, backward, seed)

    def _outputs(
        self,
        batches: Sequence[Any],
        shares: Sequence[float | Tensor],
        step: Step,
        backward: Callable[[Tensor], None],
        seed: int | None,
    ) -> list[Any]:
        losses: dict[int, Tensor] = {}
        outputs: list[Any] = [None] * len(batches)

        def forward(number: int) -> None:
            output = step(batches[number])
            loss = loss_of(output)
            if loss is not None:
                losses[number] = counted(loss, shares[number])
            outputs[number] = without_graph(output)

        def back(numbers: Sequence[int]) -> None:
            found = [losses.pop(number) for number in numbers if number in losses]
            if found:
                backward(sum(found[1:], start=found[0]))

        with ready(tensors_in(batches)):
            self._pipeline.train(len(batches), forward, back, seed)
        return outputs

    def evaluate(
        self,
        parts: Parts,
        step: Step,
        *,
        rules: Rules | None = None,
        log_rules: Rules | None = None,
        seed: int | None = None,
    ) -> Any:
        """Run forwards of all parts.

        Args:
            parts: of the batch.
            step: the user's validation, test or prediction step.
            rules: how to merge what steps return, where it is known.
            log_rules: how to merge what they log, by name, where it is known.
            seed: of the step's random numbers.

        Returns:
            What the step would return for the full batch, in the order of its samples.
        """
        sizes = parts.sizes
        outputs: list[Any] = [None] * len(sizes)

        def forward(number: int) -> None:
            outputs[number] = step(parts.batches[number])

        with self._logs.recording(), ready(tensors_in(parts.batches)):
            self._pipeline.evaluate(len(sizes), forward, seed)
        self._logs.replay(sizes, parts.weights, log_rules)
        return _merged(outputs, sizes, rules)


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a training step returns.

    Example:
        >>> loss_of({"loss": torch.tensor(2.0), "accuracy": 0.5})
        tensor(2.)

    Args:
        output: of a training step.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def without_graph(output: Any) -> Any:
    """What a step returned, no tensor of which keeps its micro-batch's graph alive.

    Args:
        output: any, nested or not.
    """
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {name: without_graph(value) for name, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(without_graph(value) for value in output)
    return output


def backward_of_part(plugin: Any, loss: Tensor, module: Any, optimizer: Any) -> None:
    """Run the backward of one part as Lightning would run that of the batch, without the hooks around it.

    Args:
        plugin: the precision plugin, which scales losses where gradients would vanish.
        loss: weighted, and divided by the batches that are accumulated.
        module: whose `backward` may be the user's own.
        optimizer: the optimizer.
    """
    scaler = getattr(plugin, "scaler", None)
    plugin.backward(loss if scaler is None else scaler.scale(loss), module, optimizer)


def _refuse_missing(outputs: Sequence[Any]) -> None:
    missing = [number for number, output in enumerate(outputs) if loss_of(output) is None]
    if missing and len(missing) < len(outputs):
        raise PartlySkippedError(
            f"`training_step` returned no loss for micro-batch {missing[0] + 1} of {len(outputs)}, but one for others: "
            f"a batch is skipped as a whole or not at all. Skip it in the loader, or set schedule='naive'."
        )


def _merged_step(
    outputs: Sequence[Any], sizes: Sequence[int], shares: Sequence[float | Tensor], rules: Rules | None
) -> Any:
    losses = [loss_of(output) for output in outputs]
    first = outputs[0]
    if losses[0] is None:
        return first
    with torch.no_grad():
        terms = [counted(loss, share) for loss, share in zip(losses, shares, strict=True) if loss is not None]
        loss = sum(terms[1:], start=terms[0]).requires_grad_()
    if not isinstance(first, Mapping):
        return loss
    others = [{name: value for name, value in output.items() if name != "loss"} for output in outputs]
    return {"loss": loss, **_merged(others, sizes, rules)}


def _merged(outputs: Sequence[Any], sizes: Sequence[int], rules: Rules | None) -> Any:
    """By rules that were learned, and by guesses where nothing was learned, as of values that were equal then."""
    return merge(outputs, sizes, {**guess(outputs, sizes), **(rules or {})})
