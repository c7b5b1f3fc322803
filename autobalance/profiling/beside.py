"""Modules that a step uses and that are no part of the model, such as an average of it: nobody counts them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from autobalance.units import format_size


def beside(model: nn.Module, step: Callable[..., Any] | None) -> Iterator[str]:
    """One note for each module that the step's function refers to and whose tensors the model lacks.

    Example:
        >>> average = AveragedModel(model)                                              # doctest: +SKIP
        >>> next(beside(model, lambda model, batch: average.update_parameters(model)))  # doctest: +SKIP
        'the step uses AveragedModel (4.00 MiB) ...'

    Args:
        model: that is profiled.
        step: as the user gave it; None: the model is called.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for module in dict.fromkeys(_modules_of(step)):
        lacking = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in own]
        if lacking:
            nbytes = sum(tensor.nbytes for tensor in lacking)
            yield (
                f"not counted: the step uses {type(module).__name__} ({format_size(nbytes)}), which is no part of the "
                f"model: its tensors stay where they are, and what the step does to them is done; make it an attribute "
                f"of the model, and it is placed and counted with it"
            )


def _modules_of(step: Any) -> Iterator[nn.Module]:
    if isinstance(step, partial):
        held = [*step.args, *step.keywords.values()]
        yield from (value for value in held if isinstance(value, nn.Module))
        yield from _modules_of(step.func)
    elif inspect.isfunction(step) or inspect.ismethod(step):
        names = inspect.getclosurevars(step)
        # `model.net` mentions `net` too, which need not be the global of that name.
        loaded = {each.argval for each in dis.get_instructions(step) if each.opname == "LOAD_GLOBAL"}
        held = [*names.nonlocals.values(), *(names.globals[name] for name in loaded & names.globals.keys())]
        yield from (value for value in held if isinstance(value, nn.Module))
