"""Metrics in a trial: they keep their bytes but compute nothing, so that no fake number reaches a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_metric(module: nn.Module) -> bool:
    """Whether `module` is a torchmetrics metric or collection, told without importing torchmetrics."""
    return any(
        base.__module__.partition(".")[0] == "torchmetrics" and base.__name__ in ("Metric", "MetricCollection")
        for base in type(module).__mro__
    )


def stand_in_for_metric(metric: Any) -> nn.Module:
    """A module that answers as the metric does, with placeholders.

    Args:
        metric: a torchmetrics metric or collection.
    """
    if hasattr(metric, "items") and hasattr(metric, "keys"):
        return PlaceholderCollection({name: PlaceholderMetric(part) for name, part in metric.items()})
    return PlaceholderMetric(metric)


class PlaceholderMetric(nn.Module):
    """Holds tensors as large as the metric's state; every value it gives is a zero.

    Args:
        metric: the metric it stands for.
    """

    placeholder_device = True

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self._kind = type(metric).__name__
        states = getattr(metric, "metric_state", {})
        for index, state in enumerate(value for value in states.values() if isinstance(value, Tensor)):
            self.register_buffer(f"state_{index}", torch.zeros_like(state, device="cpu"), persistent=False)
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """A zero."""
        return self.compute()

    def compute(self) -> Tensor:
        """A zero on the device of the metric."""
        zero: Tensor = self.get_buffer("zero")
        return zero.clone()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to add to."""

    def reset(self) -> None:
        """Nothing to forget."""


class PlaceholderCollection(nn.ModuleDict):
    """A collection of placeholders; every value it gives is a dictionary of zeros."""

    placeholder_device = True

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """A zero for each metric."""
        return self.compute()

    def compute(self) -> dict[str, Tensor]:
        """A zero for each metric."""
        return {name: metric() for name, metric in self.items()}

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to add to."""

    def reset(self) -> None:
        """Nothing to forget."""
