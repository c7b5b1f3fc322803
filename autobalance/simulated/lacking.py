"""Kernels that CUDA has, for types for which the CPU has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance.simulated.dispatch import emulate

_aten = torch.ops.aten


def register() -> None:
    """Let the operators of this module be carried out for every type that CUDA takes."""
    emulate(_aten.histc.default, _histc)


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """CUDA counts integers, too; mixtures of experts rely on it."""
    counted = values if values.is_floating_point() else values.double()
    result: Tensor = _aten.histc.default(counted, *args, **kwargs)
    return result.to(values.dtype)
