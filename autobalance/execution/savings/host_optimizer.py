"""Optimizers whose state is in host memory: gradients and weights go down, the step runs there, new weights come up.

As in ZeRO-Offload (Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"), but weights go down at
each step as well: a master copy on the host would not know of weights that were clipped, averaged or loaded meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from autobalance.execution.savings.host_copies import to_host
from autobalance.placement.hooks import Remove

_ATTRIBUTE = "_autobalance_on_host"


def host_parameters(root: nn.Module, devices: Collection[torch.device]) -> list[nn.Parameter]:
    """Trainable parameters on devices whose optimizer state is to be on the host.

    Example:
        >>> host_parameters(nn.Linear(2, 2), [])
        []

    Args:
        root: the model, placed.
        devices: which; the host itself needs no copies.
    """
    away = {device for device in devices if device.type != "cpu"}
    return [parameter for parameter in root.parameters() if parameter.requires_grad and parameter.device in away]


def on_host(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Remove:
    """Let an optimizer keep the state of some parameters in host memory, and update them there.

    The optimizer stays what it is to everybody else: param groups, schedulers, gradient scalers and checkpoints know
    its parameters as before.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())                             # doctest: +SKIP
        >>> on_host(optimizer, host_parameters(model, [torch.device("cuda", 0)]))         # doctest: +SKIP

    Args:
        optimizer: of any class that updates each parameter by itself.
        parameters: of which; those that it does not have are left out.

    Returns:
        What undoes it; the state stays where it is.

    Raises:
        ValueError: it gathers all parameters, or was told to work in graphs of CUDA or of autograd.
    """
    wanted = set(parameters)
    steps = _HostSteps([each for group in optimizer.param_groups for each in group["params"] if each in wanted])
    if not steps.parameters:
        return _nothing
    _refuse(optimizer)
    steps.take_state_down(optimizer)
    handles = [
        optimizer.register_step_pre_hook(steps.before_step),
        optimizer.register_step_post_hook(steps.after_step),
        optimizer.register_load_state_dict_pre_hook(steps.before_load),
        optimizer.register_load_state_dict_post_hook(steps.after_load),
    ]
    setattr(optimizer, _ATTRIBUTE, steps)
    return partial(_remove, optimizer, handles)


def is_on_host(optimizer: Optimizer, parameter: Any) -> bool:
    """Whether an optimizer's state of a parameter is in host memory.

    Example:
        >>> is_on_host(torch.optim.SGD([weight], lr=0.1), weight)                         # doctest: +SKIP
        False

    Args:
        optimizer: of any kind.
        parameter: of the model.
    """
    steps: _HostSteps | None = getattr(optimizer, _ATTRIBUTE, None)
    return steps is not None and parameter in steps.parameters


def end_failed_step(optimizer: Optimizer) -> None:
    """Give an optimizer its own parameters, with their state, where a step that failed has left others in their place.

    Example:
        >>> end_failed_step(torch.optim.SGD([weight], lr=0.1))                            # doctest: +SKIP

    Args:
        optimizer: of any kind; one without state on the host is left as it is.
    """
    steps: _HostSteps | None = getattr(optimizer, _ATTRIBUTE, None)
    if steps is not None:
        steps.give_back(optimizer)


class _HostSteps:
    """Lends an optimizer parameters on the host for the time of a step.

    Args:
        parameters: whose state is on the host.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.parameters = dict.fromkeys(parameters)
        self._lent: dict[Any, nn.Parameter] = {}  # by what stands for it on the host

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Go down once the gradients are there: a closure makes them inside the step."""
        self.give_back(optimizer)  # what a step that failed has left
        position = 1  # the optimizer itself comes first
        closure = args[position] if len(args) > position else kwargs.get("closure")
        if closure is None:
            self._go_down(optimizer)
            return None
        wrapped = partial(self._evaluate, optimizer, closure)
        if len(args) > position:
            return (*args[:position], wrapped, *args[position + 1 :]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Bring new weights up."""
        with torch.no_grad():
            for twin, parameter in self._lent.items():
                parameter.copy_(twin, non_blocking=True)
        self.give_back(optimizer)

    def before_load(self, optimizer: Optimizer, state_dict: Any) -> None:
        """Let the state arrive where the parameters seem to be: on the host."""
        self.give_back(optimizer)
        self._lend(optimizer, {parameter: _empty_on_host(parameter) for parameter in self.parameters})

    def after_load(self, optimizer: Optimizer) -> None:
        """The state is there."""
        self.give_back(optimizer)

    def take_state_down(self, optimizer: Optimizer) -> None:
        """Send what state there is to the host."""
        for parameter in self.parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    state[name] = value.to("cpu")

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._go_down(optimizer)
        return loss

    def _go_down(self, optimizer: Optimizer) -> None:
        self.take_state_down(optimizer)
        with torch.no_grad():
            going = [
                (parameter, to_host(parameter.detach()), to_host(parameter.grad))
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter in self.parameters and parameter.grad is not None
            ]
            twins = {}
            for parameter, weights, gradient in going:
                twins[parameter] = nn.Parameter(weights.wait())
                twins[parameter].grad = gradient.wait()
        self._lend(optimizer, twins)

    def _lend(self, optimizer: Optimizer, twins: dict[Any, nn.Parameter]) -> None:
        self._lent = {twin: parameter for parameter, twin in twins.items()}
        _replace_parameters(optimizer, twins)

    def give_back(self, optimizer: Optimizer) -> None:
        """Let the optimizer have its own parameters again, with the state of those that were lent."""
        _replace_parameters(optimizer, self._lent)
        self._lent = {}


def _replace_parameters(optimizer: Optimizer, by: dict[Any, nn.Parameter]) -> None:
    """Let other parameters stand in the place of some, with their state."""
    if not by:
        return
    for group in optimizer.param_groups:
        group["params"] = [by.get(parameter, parameter) for parameter in group["params"]]
    for parameter, other in by.items():
        if parameter in optimizer.state:
            optimizer.state[other] = optimizer.state.pop(parameter)


def _empty_on_host(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter.detach(), device="cpu"))


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "the plan keeps optimizer state on the host, but LBFGS gathers the gradients of all parameters in one "
            "tensor: use another optimizer, or plan with offload=False."
        )
    for flag in ("capturable", "differentiable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise ValueError(
                f"the plan keeps the state of {name} on the host, where its step runs, but it was made with "
                f"{flag}=True, which needs all of it on the device: make it without that, or plan with offload=False."
            )


def _remove(optimizer: Optimizer, handles: list[Any]) -> None:
    end_failed_step(optimizer)
    for handle in handles:
        handle.remove()
    if hasattr(optimizer, _ATTRIBUTE):
        delattr(optimizer, _ATTRIBUTE)


def _nothing() -> None:
    """There was nothing to do."""
