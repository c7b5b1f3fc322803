"""Private names of torch's recurrent layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def flat_weights_of(module: nn.Module) -> Iterator[None]:
    """Inside, recurrent layers in `module` use what is registered as their weights, not the list that they keep.

    Args:
        module: a module in whose table of parameters others have been put.
    """
    layers: list[Any] = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    before = [layer._flat_weights for layer in layers]
    for layer in layers:
        layer.__dict__["_flat_weights"] = [getattr(layer, name, None) for name in layer._flat_weights_names]
    try:
        yield
    finally:
        for layer, weights in zip(layers, before, strict=True):
            layer.__dict__["_flat_weights"] = weights
