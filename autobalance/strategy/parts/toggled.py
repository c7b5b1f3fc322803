"""Steps that change which parameters have gradients, as `toggle_optimizer` does: others under way would see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autobalance.strategy.parts.splittable import listed

_SETTERS = (torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_)  # type: ignore[attr-defined]


class Toggled(TorchFunctionMode):
    """Notes which parameters of a module have gradients otherwise than before while operations run inside.

    Example:
        >>> with Toggled(module) as toggled:                                      # doctest: +SKIP
        ...     module.training_step(batch, 0)
        >>> toggled.against("1f1b")                                               # doctest: +SKIP
        'the step changes for which parameters gradients are made (`critic.0.weight`), which other micro-batches ...'

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._before = {id(each): (name, each.requires_grad) for name, each in module.named_parameters()}
        self._otherwise: dict[str, None] = {}
        self._noted: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SETTERS and id(args[0]) in self._before:
            name, before = self._before[id(args[0])]
            self._otherwise.pop(name, None)
            if args[0].requires_grad != before:
                self._otherwise[name] = None
        elif self._otherwise and getattr(func, "__name__", "") != "__get__":
            self._noted |= self._otherwise
        return result

    def against(self, schedule: str) -> str | None:
        """Why batches must not be split under a schedule; None where one forward comes after the other.

        Args:
            schedule: of the plan.
        """
        if not self._noted or schedule == "gpipe":
            return None
        return (
            f"the step changes for which parameters gradients are made ({listed(list(self._noted))}), which other "
            f"micro-batches under way would see. schedule='gpipe' splits batches all the same: there one forward comes "
            f"after the other"
        )
