"""All that a step may change before its optimizer steps, as it was: a step that has failed can run again from there."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autobalance.compat import logged_values
from autobalance.execution.savings.host_copies import to_host_in_order
from autobalance.profiling.sandbox import random_state
from autobalance.strategy.parts.pipelined import without_graph
from autobalance.strategy.recovery.changing import ChangingTensors, version_of
from autobalance.strategy.trials.metrics import is_metric

_LONGEST_CONTAINER = 10_000  # longer ones hold what was collected over many steps: too much to copy before each

DROPPED, ADDED, BY_HAND = "dropped", "added", "by hand"


class Parts:
    """The parts of a model that steps may change, found once.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.changing = ChangingTensors(module)
        self.parameters = tuple(module.parameters())
        self.with_attributes = (module, *(part for part in module.modules() if is_metric(part)))


class StepState:
    """Random states, gradients, buffers, metrics, logged values and the module's own attributes before a step.

    Example:
        >>> before = StepState(trainer, parts)            # doctest: +SKIP
        >>> run_step()                                    # doctest: +SKIP
        >>> if not (reason := before.refusal()):          # doctest: +SKIP
        ...     before.put_back()

    Args:
        trainer: a Trainer about to run a batch.
        parts: what of its module may change.
        gradients: what becomes of those that are there: `DROPPED`, `ADDED` to or treated `BY_HAND`.
    """

    def __init__(self, trainer: Any, parts: Parts, gradients: str = ADDED) -> None:
        self._changing = parts.changing
        self._tensors = parts.changing.note()
        self._attributes = [_Attributes(module) for module in parts.with_attributes]
        self._logged = logged_values(trainer, put_aside)
        self._random = random_state()
        self._weights = [(parameter, version_of(parameter)) for parameter in parts.parameters]
        self._gradients = _Gradients(parts.parameters, gradients, trainer.optimizers)
        self._progress = _Progress(trainer)

    def settle(self) -> None:
        """Learn from a step that went well."""
        self._changing.learn(self._tensors)

    @property
    def has_updated(self) -> bool:
        """Whether any weight has changed."""
        return any(version_of(parameter) != version for parameter, version in self._weights)

    def refusal(self) -> str | None:
        """Why the step cannot run again; None if it can."""
        if self.has_updated:
            return "weights were changed before memory ran out"
        if self._gradients.are_mixed:
            return (
                "this batch's gradients have been added in part to those of the batches before it in the same "
                "accumulation window"
            )
        if lost := self._tensors.lost():
            return f"{', '.join(lost[:3])} changed in this step for the first time, and no copy of it had been made"
        return None

    def put_back(self) -> None:
        """Put all back but the random states: planning comes first."""
        self._gradients.put_back()
        self._tensors.put_back()
        for attributes in self._attributes:
            attributes.put_back()
        self._logged()
        self._progress.put_back()

    def put_random_numbers_back(self) -> None:
        """Let the next step draw the random numbers that the failed one has drawn."""
        self._random()


class _Gradients:
    """Gradients before a step, told by identity and version: holding them would keep what the step frees."""

    def __init__(self, parameters: Sequence[nn.Parameter], what_becomes: str, optimizers: Sequence[Optimizer]) -> None:
        dropped = _parameters_of(optimizers) if what_becomes == DROPPED else frozenset()
        self._by_hand = what_becomes == BY_HAND
        self._before = [
            (parameter, None if id(parameter) in dropped else _name_of(parameter.grad)) for parameter in parameters
        ]

    @property
    def are_mixed(self) -> bool:
        return any(self._is_mixed(before, parameter.grad) for parameter, before in self._before)

    def put_back(self) -> None:
        for parameter, before in self._before:
            if before != _name_of(parameter.grad):
                parameter.grad = None

    def _is_mixed(self, before: tuple[int, int] | None, now: Tensor | None) -> bool:
        if before is None or before == _name_of(now):
            return False
        # A step that zeroes gradients itself has no use for those of the step before.
        return not self._by_hand or (now is not None and id(now) == before[0])


def _name_of(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), version_of(gradient))


def _parameters_of(optimizers: Sequence[Optimizer]) -> frozenset[int]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return frozenset(id(parameter) for group in groups for parameter in group["params"])


class _Attributes:
    """Python attributes of one module, and what its own lists and dictionaries hold."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = {name: put_aside(value) for name, value in vars(module).items()}
        self._contents = [
            (value, copy.copy(value))
            for name, value in vars(module).items()
            if not name.startswith("_")
            and isinstance(value, (list, dict, set, deque))
            and len(value) <= _LONGEST_CONTAINER
        ]

    def put_back(self) -> None:
        now = vars(self._module)
        values = {name: value() for name, value in self._values.items()}
        values |= {name: without_graph(now.get(name)) for name, value in values.items() if value is _GONE}
        now.clear()
        now.update(values)
        for container, kept in self._contents:
            _refill(container, kept)


_SMALL = 1024
"""Elements up to which a tensor is copied to the host, to have its numbers again."""
_GONE = object()


def put_aside(value: Any) -> Callable[[], Any]:
    """Take a value, and give what returns it.

    A tensor on a device is not held: the step replaces it, as it does a kept loss, and its memory is wanted for the
    next one. A small one comes back from the host, a large one if somebody still holds it.

    Args:
        value: anything.

    Returns:
        What returns the value, or `_GONE`.
    """
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.is_cpu:
        return lambda: value
    reference, device = weakref.ref(value), value.device
    if value.numel() > _SMALL:
        return lambda: _GONE if (alive := reference()) is None else alive
    copied = to_host_in_order(value)
    return lambda: copied.to(device) if (alive := reference()) is None else alive


class _Progress:
    """How often Lightning has zeroed gradients, which a step does before its backward and a checkpoint keeps."""

    def __init__(self, trainer: Any) -> None:
        counts = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        self._kept = [(vars(each), dict(vars(each))) for each in (counts.total, counts.current)]

    def put_back(self) -> None:
        for attributes, kept in self._kept:
            attributes.update(kept)


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, deque):
        container.clear()
        container.extend(kept)
    elif isinstance(container, list):
        container[:] = kept
    else:
        container.clear()
        container.update(kept)
