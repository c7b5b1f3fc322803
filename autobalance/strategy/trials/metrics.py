"""Metrics in a trial: they keep their bytes but compute nothing, so that no fake number reaches a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.compat import metrics as private
from autobalance.execution.micro_batch import current_micro_batch


def is_metric(module: nn.Module) -> bool:
    """Whether `module` is a torchmetrics metric or collection, told without importing torchmetrics."""
    return any(
        base.__module__.partition(".")[0] == "torchmetrics" and base.__name__ in ("Metric", "MetricCollection")
        for base in type(module).__mro__
    )


def counts_samples(given: Sequence[Any]) -> bool:
    """Whether what a metric is given has samples, as scalars have not.

    Args:
        given: its arguments.
    """
    tensors = [value for value in given if isinstance(value, Tensor)]
    has_samples = not given or (bool(tensors) and all(tensor.dim() for tensor in tensors))
    return has_samples and not any(isinstance(value, float) for value in given)


def stand_in_for_metric(metric: Any) -> nn.Module:
    """A module that answers as the metric does, with placeholders.

    Args:
        metric: a torchmetrics metric or collection.
    """
    return PlaceholderCollection(metric) if hasattr(metric, "items") else PlaceholderMetric(metric)


class PlaceholderMetric(nn.Module):
    """Holds tensors as large as the metric's state and the defaults that it goes back to; every value is a zero.

    Args:
        metric: the metric it stands for.
    """

    placeholder_device = True

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self._kind = type(metric).__name__
        states = getattr(metric, "metric_state", {})
        for index, state in enumerate(value for value in states.values() if isinstance(value, Tensor)):
            for what in ("state", "default"):
                self.register_buffer(f"{what}_{index}", torch.zeros_like(state, device="cpu"), persistent=False)
        self.register_buffer("zero", torch.zeros(()), persistent=False)
        self._lists = any(isinstance(state, list) for state in states.values())
        self._is_merged = hasattr(metric, "_defaults") and private.states_can_be_merged(metric)
        self._kept: list[Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """A zero."""
        self.update(*args, **kwargs)
        value = self.compute()
        if current_micro_batch() is not None:
            self._kept.append(value)
        return value

    def compute(self) -> Tensor:
        """A zero on the device of the metric."""
        zero: Tensor = self.get_buffer("zero")
        return zero.clone()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """In a micro-batch keep what the run keeps of it: a state, or else a copy of the metric and the arguments."""
        if current_micro_batch() is None:
            return
        given = [*args, *kwargs.values()]
        is_copied = not (self._is_merged and counts_samples(given))
        states = [buffer for name, buffer in self.named_buffers() if name.startswith("state_")]
        self._kept += [torch.empty_like(state) for state in states * (1 + is_copied)]
        if is_copied or self._lists:
            self._kept += [value.detach() for value in given if isinstance(value, Tensor)]

    def reset(self) -> None:
        """Nothing to forget."""

    def end_step(self) -> None:
        """All micro-batches of a step have run."""
        self._kept.clear()


class PlaceholderCollection(nn.ModuleDict):
    """A collection of placeholders; every value it gives is a dictionary of zeros.

    Args:
        collection: the collection it stands for.
    """

    placeholder_device = True

    def __init__(self, collection: Any) -> None:
        super().__init__()
        for name, metric in collection.items(keep_base=True):  # with its prefix it may be no name of a module
            self[name] = PlaceholderMetric(metric)
        self._shown: list[str] = list(collection.keys())

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """A zero for each metric."""
        return self._named([metric(*args, **kwargs) for metric in self._metrics])

    def compute(self) -> dict[str, Tensor]:
        """A zero for each metric."""
        return self._named([metric.compute() for metric in self._metrics])

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As each metric is updated."""
        for metric in self._metrics:
            metric.update(*args, **kwargs)

    def reset(self) -> None:
        """Nothing to forget."""

    @property
    def _metrics(self) -> list[Any]:
        return list(self.values())

    def _named(self, values: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._shown, values, strict=True))


def end_step_of_metrics(twin: nn.Module) -> None:
    """Have the placeholders of a trial's copy let go of what they keep for micro-batches.

    Args:
        twin: the copy.
    """
    for module in twin.modules():
        if isinstance(module, PlaceholderMetric):
            module.end_step()
