"""Whether what a profile is asked of can be trained at all, said in words before torch says it in its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Refusal(Exception):
    """What the user asked for cannot be, whatever it is run on."""


class RefusedType(Refusal, TypeError):
    """It is of another kind than it must be."""


class RefusedValue(Refusal, ValueError):
    """It is of the right kind, but makes no sense."""


def check_model(model: Any, batch: Any) -> None:
    """Refuse what is no module or is split over devices already, and a loader in place of a batch.

    Args:
        model: to be profiled.
        batch: that it is called with.

    Raises:
        TypeError: it is something else; the text says what to give.
        ValueError: it is split over devices.
    """
    if isinstance(model, type):
        raise RefusedType(f"model={model.__name__} is a class: give an instance of it, such as {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        raise RefusedType(f"model is {_article(model)}, but a profile is of a torch.nn.Module.")
    places = {str(parameter.device) for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")}
    if len(places) > 1:
        raise RefusedValue(
            f"the model is on {', '.join(sorted(places))} already: profile it before it is placed, or a copy that "
            f"is on the CPU or on meta."
        )
    if isinstance(batch, DataLoader):
        raise RefusedType("batch is a DataLoader, but a profile is of one batch: give next(iter(loader)).")


def check_callables(optimizer: Any, step: Any) -> None:
    """Refuse an optimizer that is made already, and a step that is no function.

    Args:
        optimizer: as given to `profile`.
        step: as given to `profile`.

    Raises:
        TypeError: it cannot be called; the text says what to give.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise RefusedType(
            f"optimizer is {_article(optimizer)} that is made already, for the parameters of your model, but the trial "
            f"runs on a copy: give the class, torch.optim.{kind}, or a function of parameters, "
            f"lambda parameters: {kind}(parameters, lr=...)."
        )
    if optimizer is not None and not callable(optimizer):
        raise RefusedType(f"optimizer={optimizer!r} cannot be called: give a class, such as torch.optim.AdamW.")
    if step is not None and not callable(step):
        raise RefusedType(f"step={step!r} cannot be called: give a function of (model, batch) that returns the loss.")


def made_optimizer(make: Callable[[Any], torch.optim.Optimizer], parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of the trial's copy of the model.

    Args:
        make: class or callable on parameters.
        parameters: those that require gradients.

    Raises:
        TypeError: it returned something else, or its `step` cannot be called by itself.
        ValueError: there is nothing to optimize, or it took the parameters of another model.
    """
    if not parameters:
        raise RefusedValue(
            "no parameter of the model requires gradients, so the optimizer has nothing to do: leave optimizer= out "
            "and say training=False, or unfreeze what is to be trained."
        )
    optimizer = make(parameters)
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        raise RefusedType(f"optimizer= returned {_article(optimizer)}: it must return a torch.optim.Optimizer.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RefusedType(
            f"{type(optimizer).__name__}.step needs a closure that runs forward and backward as often as it likes, "
            f"which the trial of a plain module has not: profile with an optimizer whose step needs none."
        )
    given = {id(parameter) for parameter in parameters}
    copied = {type(parameter) for parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if held and not any(id(parameter) in given or type(parameter) in copied for parameter in held):
        raise RefusedValue(
            "optimizer= made an optimizer for other parameters than those it was called with, probably those of your "
            "own model, but the trial runs on a copy: use the argument, as in lambda parameters: AdamW(parameters)."
        )
    return optimizer


def checked_loss(loss: Any, model: nn.Module) -> Tensor:
    """The loss, from which backward can run.

    Args:
        loss: what the step returned.
        model: that it ran.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has more than one element, or depends on no parameter that requires gradients.
    """
    if not isinstance(loss, Tensor):
        raise RefusedType(
            f"the step returned {_article(loss)}, but backward runs from a tensor: return the loss from step=, such as "
            f"output.loss, or say training=False for a forward pass alone."
        )
    if loss.numel() != 1:
        raise RefusedValue(
            f"the step returned a tensor of shape {tuple(loss.shape)}, but backward runs from one number: return its "
            f".mean() or .sum() from step=, or say training=False for a forward pass alone."
        )
    if not loss.requires_grad:
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        reason = "no parameter of the model requires gradients" if frozen else "it was detached, or made under no_grad"
        raise RefusedValue(
            f"the loss that the step returned depends on no parameter ({reason}), so there is no backward: say "
            f"training=False for a forward pass alone."
        )
    return loss


def _article(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
