"""What is inside the values that are handed to blocks, and how a change of it is written back."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)
_BUILT_IN = (tuple, list, dict, deque, set, frozenset)


def is_atom(value: Any) -> bool:
    """Whether a value holds no tensor that could be moved; modules stay where they are placed."""
    return isinstance(value, _ATOMS)


def moves_itself(value: Any) -> bool:
    """Whether a value is moved by a `.to` of its own, for only that knows what it holds."""
    if isinstance(value, (*_BUILT_IN, Tensor)) or dataclasses.is_dataclass(value):
        return False
    return callable(getattr(value, "to", None))


def parts(value: Any) -> Iterator[Any]:
    """What `value` holds: items of containers, attributes of objects that stand for data; nothing for others.

    Args:
        value: anything but a tensor.
    """
    if isinstance(value, PackedSequence):
        yield from (value.data, value.sorted_indices, value.unsorted_indices)
    elif isinstance(value, (dict, Mapping)) and not moves_itself(value):
        if isinstance(value, dict) or not attributes(value):
            yield from value.values()
        yield from attributes(value).values()
    elif isinstance(value, _BUILT_IN):
        yield from value
        yield from attributes(value).values()
    elif moves_itself(value):
        for item in attributes(value).values():
            yield item
            if not is_atom(item) and not isinstance(item, Tensor) and not _is_data(item):
                yield from attributes(item).values()
    elif _is_data(value):
        yield from attributes(value).values()


_DEEPEST = 6
"""Levels down to which objects that are no data are looked into: they may hold on to anything."""


def tensors_in(value: Any, in_objects: bool = False) -> Iterator[Tensor]:
    """The tensors in a value, however deep: each once, in order.

    Example:
        >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), None]})]
        [1, 2]

    Args:
        value: of any kind.
        in_objects: whether attributes of all objects count, not only of those that stand for data.
    """
    seen: dict[int, Any] = {}  # held, so that no other object can have the id of one of them
    unread = [(value, 0)]
    while unread:
        item, depth = unread.pop()
        if id(item) in seen:
            continue
        if isinstance(item, Tensor):
            seen[id(item)] = item
            yield item
        elif not is_atom(item):
            seen[id(item)] = item
            inside = _inside(item, in_objects and depth < _DEEPEST)
            unread += [(part, depth + 1) for part in reversed(inside)]


def elements_in(value: Any) -> int:
    """Elements of all tensors in a value, each counted once, in any nesting of containers, dataclasses and objects.

    Example:
        >>> elements_in({"x": torch.zeros(8, 3), "y": torch.zeros(8)})
        32

    Args:
        value: a batch.
    """
    return sum(tensor.numel() for tensor in tensors_in(value, in_objects=True))


def untouchable(value: Any) -> Any:
    """A copy of a batch that shares its tensors: many an object's own `.to`, and many a hook, changes the object.

    Example:
        >>> untouchable(batch).to("cuda:0")     # doctest: +SKIP

    Args:
        value: a batch.

    Returns:
        The batch itself where it is made of tensors in plain containers, or refuses to be copied.
    """
    if _is_plain(value):
        return value
    try:
        return copy.deepcopy(value, {id(tensor): tensor for tensor in tensors_in(value, in_objects=True)})
    except Exception:  # locks, handles of other libraries
        return value


def _is_plain(value: Any) -> bool:
    """Whether a value is made of nothing but what is rebuilt when it is moved."""
    if is_atom(value) or isinstance(value, (Tensor, PackedSequence)):
        return True
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return type(value) in _BUILT_IN and all(map(_is_plain, value))


def _inside(item: Any, in_objects: bool) -> list[Any]:
    # The states of optimizers are such, thousands of them, and are read at every step.
    if type(item) is dict:
        return list(item.values())
    if type(item) in _BUILT_IN:
        return list(item)
    inside = list(parts(item))
    if in_objects and not _is_data(item):
        inside += attributes(item).values()
    return inside


def attributes(value: Any) -> dict[str, Any]:
    """Attributes of one object, those in slots too."""
    if type(value) in _BUILT_IN:
        return {}
    found = dict(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _is_data(value: Any) -> bool:
    """Whether an object's attributes are what it holds: dataclasses, namespaces and containers in Python."""
    return (
        isinstance(value, (*_BUILT_IN, Mapping, MutableSequence, SimpleNamespace))
        or dataclasses.is_dataclass(value)
        or moves_itself(value)
    )


class Contents(NamedTuple):
    """What a container or object held at one moment.

    Example:
        >>> before = Contents.of(numbers := [1])
        >>> numbers.append(2)
        >>> Contents.of(numbers).carry(before, target := [1], own=lambda value: value)
        >>> target
        [1, 2]

    Attributes:
        items: of a list, deque or set, in order.
        entries: of a dict.
        attributes: of anything.
    """

    items: list[Any]
    entries: dict[Any, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> Contents:
        """What `value` holds now."""
        items = list(value) if isinstance(value, (list, deque, set)) else []
        entries = dict(value.items()) if isinstance(value, dict) else {}
        return cls(items, entries, attributes(value))

    @staticmethod
    def is_changeable(value: Any) -> bool:
        """Whether a copy of `value` can be filled anew."""
        if isinstance(value, Mapping):
            return isinstance(value, MutableMapping) or bool(attributes(value))
        return not isinstance(value, (tuple, frozenset)) and _is_data(value)

    def carry(self, before: Contents, target: Any, own: Callable[[Any], Any]) -> None:
        """Make in `target` the changes that lead from `before` to these contents.

        Args:
            before: what the stand-in for `target` held at first.
            target: the caller's own container or object.
            own: what the caller gets in place of a value.
        """
        if not _same(self.items, before.items):
            items = [own(item) for item in self.items]
            target.clear()
            (target.update if isinstance(target, set) else target.extend)(items)
        for key in before.entries.keys() - self.entries.keys():
            del target[key]
        for key, item in self.entries.items():
            if key not in before.entries or before.entries[key] is not item:
                target[key] = own(item)
        if list(self.entries) != list(before.entries) and list(target) != list(self.entries):
            entries = {key: target[key] for key in self.entries}
            target.clear()
            target.update(entries)
        for name in before.attributes.keys() - self.attributes.keys():
            object.__delattr__(target, name)
        for name, item in self.attributes.items():
            if name not in before.attributes or before.attributes[name] is not item:
                object.__setattr__(target, name, own(item))


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
