"""The state of a module in Python: attributes, and what lists, dictionaries and plain objects in them hold."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from autobalance.compat import buffer_table, parameter_table

Changed = Callable[[Tensor], bool]
Before = Callable[[Tensor], Tensor | None]

_CONTAINERS = (list, dict, set, deque)
_MOST_OBJECTS = 20_000
_LONGEST_CONTAINER = 1_000  # of longer ones only the length is read
# Their objects are machinery, with more behind them than a step's own state.
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"}
_NOT_STATE = frozenset(vars(nn.Module()))


class Unread(NamedTuple):
    """Stands for an object that is not looked into: only whether it is the same can be told.

    Attributes:
        kind: name of its class.
        identity: its id.
    """

    kind: str
    identity: int


class Copied(NamedTuple):
    """The numbers of a tensor that has changed, and those it had before if they are known, on the host.

    Attributes:
        tensor: the numbers now.
        before: the numbers then; None: not known.
    """

    tensor: Tensor
    before: Tensor | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the numbers are others than before, by more than rounding."""
        moved = _movement(self)
        return moved is None or bool((moved.abs() > _rounding(self.tensor)).any())


Reading = Mapping[tuple[str, str], Any]
"""Values by the qualified name of the attribute, and where in it they are."""


class ModuleState:
    """What the modules under a root hold, as it is when this is made.

    Example:
        >>> module.seen = [1]
        >>> state = ModuleState(module)
        >>> module.seen.append(2)
        >>> state.put_back()
        >>> module.seen
        [1]

    Args:
        root: the module; every module in it is looked at.
        skip: modules that are put back but not read, such as metrics, whose state is merged by rules of its own.
        beside: other values to put back, such as batches.
    """

    def __init__(
        self,
        root: nn.Module,
        skip: Callable[[nn.Module], bool] = lambda module: False,
        beside: Sequence[Any] = (),
    ) -> None:
        self._root = root
        self._skip = skip
        self._restores: list[Callable[[], None]] = []
        for module in root.modules():
            self._note(vars(module))
            self._note(buffer_table(module))
            self._note(parameter_table(module))
        self.tensors = [value for value in self._walk(beside) if isinstance(value, Tensor)]

    def put_back(self) -> None:
        """Make attributes and containers hold what they held; numbers in tensors are left as they are."""
        for restore in self._restores:
            restore()

    def reading(self, changed: Changed, before: Before = lambda tensor: None) -> Reading:
        """What can be told of the values now.

        Args:
            changed: whether a tensor is not what it was when this was made; of those that are, the numbers are copied.
            before: the numbers that a tensor had, where they are known.
        """
        reader = _Reader(changed, before)
        for name, module in self._root.named_modules():
            if module is self._root or not self._skip(module):
                for attribute, value in _state_of(module):
                    reader.read(value, f"{name}.{attribute}" if name else attribute, "")
        return reader.found

    def _note(self, attributes: Any) -> None:
        kept = dict(attributes)

        def restore() -> None:
            attributes.clear()
            attributes.update(kept)

        self._restores.append(restore)

    def _walk(self, beside: Sequence[Any]) -> Iterator[Any]:
        """All values, each once; how to put back what they hold is noted on the way."""
        seen: set[int] = set()
        pending: deque[Any] = deque(beside)
        for module in self._root.modules():
            pending.extend(value for _, value in _state_of(module))
        while pending and len(seen) < _MOST_OBJECTS:
            value = pending.popleft()
            if id(value) in seen or isinstance(value, nn.Module):
                continue
            seen.add(id(value))
            yield value
            if isinstance(value, _CONTAINERS):
                self._restores.append(_refilling(value))
                if len(value) <= _LONGEST_CONTAINER:
                    pending.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, tuple):
                pending.extend(value[:_LONGEST_CONTAINER])
            elif (restore := _random_numbers(value)) is not None:
                self._restores.append(restore)
            elif _is_plain_object(value):
                self._note(vars(value))
                pending.extend(vars(value).values())


def first_difference(one: Reading, other: Reading, tolerance: float) -> str | None:
    """The name of the first attribute that two readings disagree on; None if there is none.

    Args:
        one, other: readings of the same module.
        tolerance: relative difference up to which numbers agree.
    """
    for key in {**one, **other}:
        if key not in one or key not in other or not _agree(one[key], other[key], tolerance):
            return key[0]
    return None


def _agree(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, Copied) and isinstance(other, Copied):
        return _are_close(one.tensor, other.tensor, tolerance) and _have_moved_alike(one, other, tolerance)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _have_moved_alike(one: Copied, other: Copied, tolerance: float) -> bool:
    """Whether changes agree, which may be small beside the numbers: a teacher follows by a thousandth of the way."""
    first, second = _movement(one), _movement(other)
    if first is None or second is None:
        return True
    allowed = tolerance * float(torch.maximum(first.abs(), second.abs()).max()) + _rounding(one.tensor)
    return bool(((first - second).abs() <= allowed).all())


def _movement(copied: Copied) -> Tensor | None:
    """How far numbers are from where they were; None where that cannot be said."""
    now, before = copied.tensor, copied.before
    if before is None or before.shape != now.shape or not now.is_floating_point() or not now.numel():
        return None
    moved = now.double() - before.double()
    return moved if bool(moved.isfinite().all()) else None


def _rounding(tensor: Tensor) -> float:
    return 8 * torch.finfo(tensor.dtype).eps * float(tensor.abs().max())


class _Reader:
    """Reads values into one mapping; what is met again is read once."""

    def __init__(self, changed: Changed, before: Before) -> None:
        self.found: dict[tuple[str, str], Any] = {}
        self._changed = changed
        self._before = before
        self._seen: set[int] = set()

    def read(self, value: Any, name: str, where: str) -> None:
        if type(value) is ref:  # made anew, it is another object: recurrent layers keep some of their weights
            value = value()
        if isinstance(value, Tensor):
            self.found[name, where] = self._numbers(value)
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            self.found[name, where] = value
        elif isinstance(value, (set, frozenset)):
            self.found[name, where] = frozenset(value)
        elif isinstance(value, (list, tuple, deque, dict)):
            self.found[name, f"{where}.length"] = len(value)
            self._inside(value, name, where)
        elif not isinstance(value, nn.Module) and _is_plain_object(value):
            self._inside(value, name, where)
        else:
            self.found[name, where] = Unread(type(value).__name__, id(value))

    def _numbers(self, tensor: Tensor) -> Any:
        if not self._changed(tensor):
            return Unread("Tensor", id(tensor))
        before = self._before(tensor)
        return Copied(tensor.detach().to("cpu", copy=True), None if before is None else before.to("cpu", copy=True))

    def _inside(self, value: Any, name: str, where: str) -> None:
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen.add(id(value))
        if not isinstance(value, (list, tuple, deque, dict)):
            for attribute, item in list(vars(value).items()):
                self.read(item, name, f"{where}.{attribute}")
        elif len(value) <= _LONGEST_CONTAINER:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.read(item, name, f"{where}[{key!r}]")


def _state_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for attributes in (vars(module), buffer_table(module), parameter_table(module)):
        for name, value in list(attributes.items()):
            if name not in _NOT_STATE:
                yield name, value


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, type) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] not in _FOREIGN


def _random_numbers(value: Any) -> Callable[[], None] | None:
    """How to put a generator of NumPy or Python back; torch's do not advance where random numbers are constant."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _refilling(container: Any) -> Callable[[], None]:
    kept = container.copy()

    def restore() -> None:
        if isinstance(container, list):
            container[:] = kept
        else:
            container.clear()
            (container.extend if isinstance(container, deque) else container.update)(kept)

    return restore
