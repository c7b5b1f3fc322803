"""What parameters need that the sampled batch does not train, such as those of experts that it does not choose.

Another batch may train them: without their gradients and optimizer state a plan could exceed its budgets.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def as_if_trained(parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Give parameters a gradient and optimizers a step, after which their state exists.

    Args:
        parameters: those without a gradient.
        optimizers: of the trial; one whose step needs a closure takes none.

    Returns:
        The gradients. A step that follows is as if it trained these parameters too while somebody holds them.
    """
    with torch.no_grad():
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        if not _needs_closure(optimizer):
            optimizer.step()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def optimized(parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Those of `parameters` that an optimizer holds.

    Args:
        parameters: of the model.
        optimizers: of the trial.
    """
    held = {id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]}
    return [parameter for parameter in parameters if id(parameter) in held]


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
