"""Move what a block is given to the block's place, whatever it is nested in.

Containers keep their type and are rebuilt only if a tensor in them moves; one object met twice stays one object; what a block then
adds to a list or dict that had to be rebuilt is carried back to the caller's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autobalance.placement.locate import Locator, Place

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)


class Mover:
    """Moves the arguments of one call to one place.

    Example:
        >>> mover = Mover(locator, torch.device("cuda", 1))  # doctest: +SKIP
        >>> args, kwargs = mover.move((args, kwargs))        # doctest: +SKIP
        >>> mover.carry_back()                               # doctest: +SKIP

    Args:
        locator: knows where tensors are and sends them.
        place: where everything goes.
    """

    def __init__(self, locator: Locator, place: Place) -> None:
        self._locator = locator
        self._place = place
        self._moved: dict[int, tuple[Any, Any]] = {}  # id of the original -> (original, what stands for it)
        self._rebuilt: list[tuple[Any, Any]] = []
        self._sent: list[tuple[Tensor, Tensor, int]] = []  # source, copy, the copy's version when it was handed over

    def move(self, value: Any) -> Any:
        """`value` with every tensor at the place: the same object if nothing in it had to move."""
        if isinstance(value, _ATOMS):
            return value
        known = self._moved.get(id(value))
        if known is not None:
            return known[1]
        # Entered before its contents are seen: a container that contains itself is left as it is at that spot.
        self._moved[id(value)] = (value, value)
        result = self._move_new(value)
        self._moved[id(value)] = (value, result)
        return result

    def changed_in_place(self) -> list[Tensor]:
        """The sources of copies that were changed in place since they were handed over."""
        return [source for source, sent, version in self._sent if sent._version != version]

    def carry_back(self) -> None:
        """Bring what the block added to rebuilt lists, dicts and objects back to the caller's own."""
        if not self._rebuilt:
            return
        originals = {id(moved): original for original, moved in self._moved.values() if moved is not original}

        def original_of(value: Any) -> Any:
            return originals.get(id(value), value)

        for original, rebuilt in self._rebuilt:
            _copy_contents(rebuilt, original, original_of)

    def restore(self, output: Any) -> Any:
        """`output` with each list or dict that stood in for the caller's own replaced by the caller's own."""
        if not self._rebuilt:
            return output
        originals = {id(rebuilt): original for original, rebuilt in self._rebuilt}
        if id(output) in originals:
            return originals[id(output)]
        if type(output) is tuple and any(id(item) in originals for item in output):
            return tuple(originals.get(id(item), item) for item in output)
        return output

    def _move_new(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = self._locator.place_of(value)
            if place is None or place == self._place:
                return value
            sent = self._locator.send(value, self._place)
            if not sent.is_inference():
                self._sent.append((value, sent, sent._version))
            return sent
        if isinstance(value, PackedSequence):
            return self._move_packed(value)
        if isinstance(value, tuple):
            return self._move_tuple(value)
        if isinstance(value, Mapping):
            return self._move_mapping(value)
        if isinstance(value, (list, deque)):
            return self._move_sequence(value)
        if isinstance(value, (set, frozenset)):
            items = [(item, self.move(item)) for item in value]
            return value if all(a is b for a, b in items) else type(value)(b for _, b in items)
        if dataclasses.is_dataclass(value):
            return self._move_attributes(value, [field.name for field in dataclasses.fields(value)])
        if callable(getattr(value, "to", None)):
            return self._move_object(value)
        return value

    def _move_packed(self, value: PackedSequence) -> PackedSequence:
        # Its batch sizes live on the host on purpose.
        data = self.move(value.data)
        if data is value.data:
            return value
        return PackedSequence(
            data, value.batch_sizes, self.move(value.sorted_indices), self.move(value.unsorted_indices)
        )

    def _move_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.move(item) for item in value]
        if all(a is b for a, b in zip(value, items, strict=True)):
            return value
        make = getattr(type(value), "_make", None)  # named tuples
        moved: tuple[Any, ...] = make(items) if make is not None else type(value)(items)
        return moved

    def _move_mapping(self, value: Mapping[Any, Any]) -> Mapping[Any, Any]:
        items = {key: self.move(item) for key, item in value.items()}
        if all(item is value[key] for key, item in items.items()):
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(items)  # type: ignore[call-arg]  # a read-only mapping is made from a dict by convention
        moved = copy.copy(value)  # keeps a default factory, attributes and the order
        for key, item in items.items():
            moved[key] = item
        self._rebuilt.append((value, moved))
        return moved

    def _move_sequence(self, value: MutableSequence[Any]) -> MutableSequence[Any]:
        items = [self.move(item) for item in value]
        if all(a is b for a, b in zip(value, items, strict=True)):
            return value
        moved = copy.copy(value)
        for index, item in enumerate(items):
            moved[index] = item
        self._rebuilt.append((value, moved))
        return moved

    def _move_attributes(self, value: Any, names: list[str]) -> Any:
        changed = {}
        for name in names:
            before = getattr(value, name, None)
            after = self.move(before)
            if after is not before:
                changed[name] = after
        if not changed:
            return value
        moved = copy.copy(value)
        for name, after in changed.items():
            object.__setattr__(moved, name, after)  # frozen dataclasses refuse the ordinary way
        self._rebuilt.append((value, moved))
        return moved

    def _move_object(self, value: Any) -> Any:
        places = {self._locator.place_of(item) for item in _attributes(value).values() if isinstance(item, Tensor)}
        places.discard(None)
        if places == {self._place}:
            return value
        moved = self._locator.send_object(value, self._place)
        return value if moved is None else moved


def _copy_contents(rebuilt: Any, original: Any, original_of: Any) -> None:
    """Make `original` equal to `rebuilt`, with the caller's own objects in place of their stand-ins."""
    if isinstance(original, MutableMapping):
        for key in [key for key in original if key not in rebuilt]:
            del original[key]
        for key in rebuilt:
            item = original_of(rebuilt[key])
            if key not in original or original[key] is not item:
                original[key] = item
    elif isinstance(original, (list, deque)):
        items = [original_of(item) for item in rebuilt]
        if len(items) != len(original) or any(a is not b for a, b in zip(items, original, strict=True)):
            original.clear()
            original.extend(items)
    else:
        before = _attributes(original)
        for name, item in _attributes(rebuilt).items():
            item = original_of(item)
            if name not in before or before[name] is not item:
                object.__setattr__(original, name, item)


def _attributes(value: Any) -> dict[str, Any]:
    """Instance attributes, those of dataclasses with slots too."""
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        found.update({f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)})
    return found
