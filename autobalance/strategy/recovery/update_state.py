"""Whether an optimizer step has begun to change anything, and what it was before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autobalance.execution.savings.host_optimizer import end_failed_step
from autobalance.placement.contents import tensors_in
from autobalance.strategy.recovery.changing import version_of


class UpdateState:
    """Versions of all that one optimizer changes.

    Example:
        >>> before = UpdateState(optimizer)
        >>> optimizer.step()
        >>> before.has_updated
        True

    Args:
        optimizer: about to step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._versions = [(tensor, version_of(tensor)) for tensor in _tensors(optimizer)]
        self._keys = {parameter: tuple(state) for parameter, state in _states(optimizer)}

    @property
    def has_updated(self) -> bool:
        """Whether a weight or a tensor of the state has changed in place."""
        return any(version_of(tensor) != version for tensor, version in self._versions)

    def put_back(self) -> None:
        """Take out of the state what was made meanwhile: optimizers take what is there for complete."""
        end_failed_step(self._optimizer)  # else what is on the host would seem to have been made meanwhile
        for parameter, state in list(_states(self._optimizer)):
            known = self._keys.get(parameter)
            if known is None:
                del self._optimizer.state[parameter]
                continue
            for key in [key for key in state if key not in known]:
                del state[key]


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    yield from tensors_in([state for _, state in _states(optimizer)], in_objects=True)


def _states(optimizer: Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict):
            yield parameter, state
