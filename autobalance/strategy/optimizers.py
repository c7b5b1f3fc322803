"""Optimizers of a model on several devices: their state is where their parameters are."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from autobalance.execution.savings.host_optimizer import is_on_host


def send_state_home(optimizers: Iterable[Optimizer]) -> None:
    """Move each parameter's state to the parameter, but for that which the plan keeps on the host.

    Step counters stay on the host, as optimizers want.

    Args:
        optimizers: some have state from the start, on the device where the parameters were then.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor) or not isinstance(state, MutableMapping):
                continue
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor) and not is_on_host(optimizer, parameter):
                    state[key] = value.to(parameter.device)


def refuse_gathering(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that gather all parameters in one tensor, which would be on one device.

    Args:
        optimizers: of the run.

    Raises:
        ValueError: for LBFGS.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS gathers the gradients of all parameters in one tensor, so it cannot train a model on several "
                "devices. Use another optimizer, or devices=1."
            )
