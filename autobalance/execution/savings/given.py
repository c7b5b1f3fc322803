"""What a block was given, as it was then: its forward may run again after others have changed their containers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from autobalance.placement.contents import Contents, attributes, is_atom


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor."""

    index: int


class Given(NamedTuple):
    """Arguments of a call, apart: the tensors, and the containers with slots in place of tensors.

    Example:
        >>> given = Given.of((torch.ones(2), {"mask": torch.zeros(2)}), {"scale": 2.0})
        >>> len(given.tensors)
        2
        >>> args, kwargs = given.call(given.tensors)

    Attributes:
        tensors: each once.
        containers: args and kwargs, in containers of their own.
    """

    tensors: tuple[Tensor, ...]
    containers: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Given:
        """Take the arguments of a call apart.

        Args:
            args: positional ones.
            kwargs: by name.
        """
        slots: dict[int, tuple[_Slot, Tensor]] = {}

        def slot(tensor: Tensor) -> _Slot:
            return slots.setdefault(id(tensor), (_Slot(len(slots)), tensor))[0]

        containers = _copied((args, kwargs), Tensor, slot, {})
        return cls(tuple(tensor for _, tensor in slots.values()), containers)

    def call(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Arguments for another call, in containers that it may change.

        Args:
            tensors: in the order of `tensors`.
        """
        called: tuple[Any, Any] = _copied(self.containers, _Slot, lambda slot: tensors[slot.index], {})
        return called


def _copied(value: Any, kind: type, stand_in: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """`value` in containers of its own, with everything of a kind replaced; what is met twice stays one object."""
    if isinstance(value, kind):
        return stand_in(value)
    if is_atom(value) or isinstance(value, (Tensor, _Slot)):
        return value
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, (tuple, frozenset)):
        made = _copied_fixed(value, [_copied(item, kind, stand_in, done) for item in value])
        done[id(value)] = value, made
        return made
    if not Contents.is_changeable(value):
        return value
    made = copy.copy(value)
    done[id(value)] = value, made  # before its items, which may hold it
    if isinstance(value, dict):
        for key, item in value.items():
            made[key] = _copied(item, kind, stand_in, done)
    elif isinstance(value, (list, deque)):
        for index, item in enumerate(value):
            made[index] = _copied(item, kind, stand_in, done)
    elif isinstance(value, set):
        made.clear()
        made.update(_copied(item, kind, stand_in, done) for item in value)
    for name, item in attributes(value).items():
        inner = _copied(item, kind, stand_in, done)
        if inner is not item:
            object.__setattr__(made, name, inner)  # frozen dataclasses refuse the ordinary way
    return made


def _copied_fixed(value: Any, items: list[Any]) -> Any:
    if all(item is before for item, before in zip(items, value, strict=True)):
        return value
    if isinstance(value, frozenset) or hasattr(type(value), "n_sequence_fields"):  # what torch's operations return
        return type(value)(items)
    return tuple.__new__(type(value), items)
