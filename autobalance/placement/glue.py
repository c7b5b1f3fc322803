"""Glue: the user's operations outside every block, run where their operands are.

A parameter or registered buffer stays where it is placed and the operation goes to it; an operation in place goes to its target; any other
goes to its first operand that is on a device of the plan. Other operands are copied there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autobalance.compat import insert_function_mode, remove_function_mode
from autobalance.placement.locate import Locator, Place
from autobalance.placement.move import Mover

# They take operands on several devices as they are: the first is told where to go, the second copies across, the rest only look.
_FREE = frozenset(
    {"to", "copy_", "cpu", "cuda", "backward", "__get__", "__set__", "__delete__", "type", "set_", "requires_grad_"}
)


class GlueMode(TorchFunctionMode):
    """While active, moves the operands of each torch function to one place.

    Args:
        locator: knows where tensors are and sends them.
        is_home: says whether a tensor is registered in the model (a parameter or buffer) and so must not be moved.
    """

    def __init__(self, locator: Locator, is_home: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._locator = locator
        self._is_home = is_home

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        if len(tensors) > 1:
            args, kwargs = self._together(func, tensors, args, kwargs)
        return func(*args, **kwargs)

    def _together(
        self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = [(tensor, place) for tensor in tensors if (place := self._locator.place_of(tensor)) is not None]
        if len({place for _, place in placed}) < 2:
            return args, kwargs
        name = getattr(func, "__name__", "")
        if name in _FREE:
            return args, kwargs
        place = self._anchor(name, placed, args, kwargs)
        args, kwargs = Mover(self._locator, place).move((args, kwargs))
        return args, kwargs

    def _anchor(
        self, name: str, placed: list[tuple[Tensor, Place]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Place:
        target = kwargs.get("out") if kwargs.get("out") is not None else args[0] if args and _in_place(name) else None
        if isinstance(target, Tensor):
            place = self._locator.place_of(target)
            if place is not None:
                return place
        home = [place for tensor, place in placed if isinstance(tensor, nn.Parameter)]
        home += [place for tensor, place in placed if self._is_home(tensor)]
        return home[0] if home else placed[0][1]


def _in_place(name: str) -> bool:
    """Whether a torch function of this name changes its first argument (`add_`, `__iadd__`, `__setitem__`)."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _tensors(values: Any, depth: int = 2) -> Iterator[Tensor]:
    """The tensors among `values` and in lists, tuples and dicts nested up to `depth` in them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, (tuple, list)):
            yield from _tensors(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _tensors(value.values(), depth - 1)


class _Active(threading.local):
    mode: GlueMode | None = None


_active = _Active()


@contextmanager
def glue(locator: Locator, is_home: Callable[[Tensor], bool]) -> Iterator[None]:
    """Run the user's operations outside blocks where their operands are.

    Example:
        >>> with glue(locator, is_home):          # doctest: +SKIP
        ...     loss = module.training_step(batch, 0)

    Args:
        locator: knows where tensors are and sends them.
        is_home: says whether a tensor is a registered parameter or buffer.
    """
    if _active.mode is not None:  # a step that calls another step
        yield
        return
    mode = GlueMode(locator, is_home)
    _active.mode = mode
    try:
        with mode:
            yield
    finally:
        _active.mode = None


class Suspended(NamedTuple):
    """Glue that is off while a block runs, and how many function modes were entered after it."""

    mode: GlueMode
    above: int


def suspend() -> Suspended | None:
    """Take the glue off while a block runs, since inside it torch works undisturbed; returns what `resume` needs."""
    mode = _active.mode
    above = None if mode is None else remove_function_mode(mode)
    if mode is None or above is None:
        return None
    _active.mode = None
    return Suspended(mode, above)


def resume(suspended: Suspended | None) -> None:
    """Put the glue back after a block has run."""
    if suspended is not None:
        insert_function_mode(suspended.mode, suspended.above)
        _active.mode = suspended.mode
