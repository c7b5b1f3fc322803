"""What a step logs in micro-batches: kept while they run, then logged as the step on the whole batch would have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.execution.batches.merging import Rule, adding_up, apply
from autobalance.strategy.parts.metric_parts import MetricCall, MetricParts, current_number

_ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""Of `LightningModule.log`, after name and value, in order."""


@dataclass(frozen=True)
class LogCall:
    """One call of `log` in a micro-batch.

    Attributes:
        number: of the micro-batch.
        name: under which the value is logged.
        value: without graph, unless the call asks for it.
        options: the other arguments that were given.
        origin: the call of a metric that gave the value, and where in its answer it is.
    """

    number: int
    name: str
    value: Any
    options: Mapping[str, Any]
    origin: tuple[MetricCall, tuple[Any, ...]] | None = None


class RecordedLogs:
    """Takes the place of `log`, and stands before the metrics, while micro-batches run.

    Example:
        >>> logs = RecordedLogs(module)                          # doctest: +SKIP
        >>> with logs.recording():                               # doctest: +SKIP
        ...     outputs = [module.training_step(part, 0) for part in parts]
        >>> logs.replay(sizes=[3, 2], weights=[0.6, 0.4])        # doctest: +SKIP

    Args:
        module: a LightningModule, or its twin in a trial.

    Attributes:
        calls: what was logged since recording began and has not been replayed, in order.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics = MetricParts(module)
        self.calls: list[LogCall] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, nothing that is logged reaches Lightning, and metrics keep their state."""
        self.calls = []
        attributes = vars(self._module)
        kept = {"log": attributes["log"]} if "log" in attributes else {}
        attributes["log"] = self._take
        try:
            with self._metrics.recording():
                yield
        finally:
            del attributes["log"]
            attributes.update(kept)

    def replay(self, sizes: Sequence[int], weights: Sequence[Any], rules: Mapping[str, Rule] | None = None) -> None:
        """Log everything once, with the values of the whole batch; to be called in the hook that ran the step.

        Args:
            sizes: samples of each micro-batch.
            weights: by which their means are weighted, adding up to 1.
            rules: by name, how values are merged for which the `reduce_fx` of their call does not say it.
        """
        self._metrics.finish(range(len(sizes)), sizes, weights)
        for calls in self._by_turn():
            self._log(calls, sizes, weights, (rules or {}).get(calls[0].name))
        self.drop()

    def drop(self) -> None:
        """Let go of what was recorded, copies of metrics included."""
        self.calls = []
        self._metrics.forget()

    def replay_one(self, number: int, size: int = 1) -> None:
        """Log what one micro-batch has logged, for micro-batches that are batches of their own.

        Args:
            number: of the micro-batch.
            size: samples that it has.
        """
        self._metrics.finish([number], [size], [1.0])
        for call in self.calls:
            if call.number == number:
                self._log([call], {number: size}, {number: 1.0})
        self.calls = [call for call in self.calls if call.number != number]

    def _take(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(_ARGUMENTS, args, strict=False))
        origin = self._metrics.origin_of(value, name)
        if isinstance(value, Tensor):
            value = value.clone() if options.get("enable_graph") else value.detach().clone()
        self.calls.append(LogCall(current_number(), name, value, options, origin))

    def _by_turn(self) -> list[list[LogCall]]:
        """The calls that micro-batches have in common: of one name, and the n-th of each."""
        turns: dict[tuple[str, int], list[LogCall]] = defaultdict(list)
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for call in self.calls:
            turns[call.name, counts[call.name, call.number]].append(call)
            counts[call.name, call.number] += 1
        return [sorted(calls, key=lambda call: call.number) for calls in turns.values()]

    def _log(
        self,
        calls: Sequence[LogCall],
        sizes: Sequence[int] | Mapping[int, int],
        weights: Sequence[Any] | Mapping[int, Any],
        rule: Rule | None = None,
    ) -> None:
        first = calls[0]
        options = dict(first.options)
        counts: list[Any] = [call.options.get("batch_size") for call in calls]
        own = [sizes[call.number] for call in calls]
        shares = [weights[call.number] for call in calls]
        if len(calls) < len(weights):
            shares = adding_up(shares)
        if all(count is not None for count in counts):
            options["batch_size"] = _whole_count(counts, own)
            if len(set(map(int, counts))) > 1 and counts != own:  # not samples: what the values are means over
                shares = adding_up(counts)
        rule = rule or _rule_of(options.get("reduce_fx", "mean"))
        self._module.log(first.name, _merged(calls, rule, shares), **options)  # type: ignore[operator]


def _whole_count(counts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The `batch_size` of the whole batch: the sum, unless each part has named that of the whole."""
    if len(set(map(int, counts))) == 1 and int(counts[0]) == sum(sizes):
        return counts[0]
    return sum(counts)


def _rule_of(reduce_fx: Any) -> Rule:
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    return Rule(name if name in ("sum", "max", "min") else "mean")


def _merged(calls: Sequence[LogCall], rule: Rule, shares: Sequence[Any]) -> Any:
    first = calls[0]
    if first.origin is not None and all(call.origin == first.origin for call in calls):
        return _at_place(first.origin[0].whole, first.origin[1])
    values = [call.value for call in calls]
    if any(not isinstance(value, (Tensor, Number)) for value in values) or len(values) == 1:
        return values[0]  # a metric, which logs what it knows
    if any(isinstance(value, Tensor) for value in values):
        device = next(value.device for value in values if isinstance(value, Tensor))
        values = [torch.as_tensor(value, device=device) for value in values]
    return apply(rule, values, shares)


def _at_place(answer: Any, place: Sequence[Any]) -> Any:
    for key in place:
        answer = answer[key]
    return answer
