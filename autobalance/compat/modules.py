"""Private names of torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters by name: the very dictionary, which takes what `setattr` refuses.

    Args:
        module: not those inside it.
    """
    table: dict[str, Any] = module._parameters
    return table


def buffer_table(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers by name, None for those that it goes without: the very dictionary.

    Args:
        module: not those inside it.
    """
    table: dict[str, Any] = module._buffers
    return table


def initialiser(module: nn.Module) -> Callable[[], Any] | None:
    """What gives a module's own parameters the values that it starts with; None for a module without that.

    Args:
        module: of torch, or with a `reset_parameters` as torch's have it.
    """
    for name in ("reset_parameters", "_reset_parameters"):  # the second: attention of torch's own
        method = getattr(module, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]  # a module's attribute may be anything
    return None
