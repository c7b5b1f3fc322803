"""Buffers and metric states that steps change, and what they held before one: for a step that has to run again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autobalance.compat import version
from autobalance.execution.savings.host_copies import to_host_in_order
from autobalance.strategy.trials.metrics import is_metric

Slot = tuple[int, str]
"""The id of a module, and the name under which it holds a tensor."""


class _Held:
    """A tensor in its place, told by identity and version: to hold it would keep what the step replaces."""

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        self.owner, self.name, self.device = owner, name, tensor.device
        self.version = version_of(tensor)
        self._reference = weakref.ref(tensor)

    @property
    def slot(self) -> Slot:
        return id(self.owner), self.name

    @property
    def tensor(self) -> Tensor | None:
        """The tensor; None where it is gone."""
        return self._reference()

    @property
    def has_changed(self) -> bool:
        tensor = self.tensor
        return tensor is None or version_of(tensor) != self.version


class ChangingTensors:
    """Remembers which buffers and metric states change in steps: only those are copied, to the host, before the next.

    Before the first step all are copied, for nothing is known yet; what lies on the devices stays as planned. Running
    statistics of norms are copied always: torch counts no version of what its kernels write there.

    Example:
        >>> changing = ChangingTensors(model)
        >>> before = changing.note()
        >>> loss = model(batch)
        >>> changing.learn(before)       # the step has gone well
        >>> before.put_back()            # or it has not

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        parts = list(root.modules())
        self._owners = [part for part in parts if is_metric(part) or any(True for _ in part.buffers(recurse=False))]
        self._known: set[Slot] | None = None
        self._pinned: dict[Slot, Tensor] = {}

    def note(self) -> NotedTensors:
        """What all of them are now."""
        held = [each for owner in self._owners for each in _held_by(owner)]
        copies: dict[Slot, Tensor] = {}
        for each in held:
            slot, tensor = each.slot, each.tensor
            if self._known is None or slot in self._known or changes_always(each.owner):
                assert tensor is not None
                copies[slot] = to_host_in_order(tensor, into=self._pinned.get(slot))
                if tensor.is_cuda:
                    self._pinned[slot] = copies[slot]  # the same memory every time
        return NotedTensors(held, copies)

    def learn(self, before: NotedTensors) -> None:
        """Take note of what has changed since `before`.

        Args:
            before: all of them, as they were before a step.
        """
        # By their numbers at first, while all are copied: what is changed past autograd has no new version either.
        numbers = self._known is None
        changed = {each.slot for each in before.held if before.differs(each, numbers)}
        self._known = changed if self._known is None else self._known | changed


class NotedTensors:
    """Buffers and metric states as they were.

    Args:
        held: all of them.
        copies: on the host, of those that may change.
    """

    def __init__(self, held: list[_Held], copies: dict[Slot, Tensor]) -> None:
        self.held = held
        self._copies = copies

    def differs(self, each: _Held, by_numbers: bool = False) -> bool:
        """Whether another tensor stands in its place now, or its numbers may have changed.

        Args:
            each: one of them.
            by_numbers: whether to compare the numbers themselves with the copy.
        """
        tensor = each.tensor
        if tensor is None or each.has_changed or id(getattr(each.owner, each.name, None)) != id(tensor):
            return True
        copy = self._copies.get(each.slot) if by_numbers else None
        return copy is not None and not torch.equal(copy, tensor.detach().cpu())

    def lost(self) -> list[str]:
        """Names of those that have changed in place where no copy was made."""
        return [
            f"{type(each.owner).__name__}.{each.name}"
            for each in self.held
            if each.has_changed and each.slot not in self._copies
        ]

    def put_back(self) -> None:
        """Put each tensor, with its numbers, back in its place."""
        for each in self.held:
            copy, tensor = self._copies.get(each.slot), each.tensor
            if tensor is None:
                assert copy is not None  # else it is one of those that are lost
                tensor = copy.to(each.device, copy=True)
            elif copy is not None:
                with torch.no_grad():
                    tensor.copy_(copy)
            if getattr(each.owner, each.name, None) is not tensor:
                setattr(each.owner, each.name, tensor)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; of one made in inference mode nobody counts, so it may have changed or not.

    Args:
        tensor: any.
    """
    return -1 if tensor.is_inference() else version(tensor)


def changes_always(module: nn.Module) -> bool:
    """Whether a module is a norm that updates statistics of its inputs while it is trained, or a metric.

    Args:
        module: any part of a model.
    """
    return getattr(module, "track_running_stats", False) is True or is_metric(module)


def _held_by(module: nn.Module) -> Iterator[_Held]:
    for name, buffer in module.named_buffers(recurse=False):
        yield _Held(module, name, buffer)
    if is_metric(module):
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield _Held(module, name, value)
