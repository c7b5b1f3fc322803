"""Glue: the user's operations outside every block, run where their operands are.

A parameter or registered buffer stays where it is placed and the operation goes to it; an operation in place goes to
its target; any other goes to its first operand that is on a device of the plan. Other operands are copied there. What
else an operation changes in place is copied back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autobalance.compat import (
    call_around_backward,
    call_at_checkpoint,
    function_modes,
    gradient_setter,
    insert_function_mode,
    remove_function_mode,
)
from autobalance.placement.locate import Locator, Place
from autobalance.placement.move import Mover

_BACKWARD = frozenset({"backward", "grad"})
# Operations that take operands on several devices as they are: told where to go, or copying across,
_FREE = frozenset({"to", "copy_", "cpu", "cuda", "type", "type_as", "set_", "__deepcopy__"})
# setting or reading what belongs to one tensor,
_FREE |= {"__get__", "__set__", "__delete__", "requires_grad_"}
# or looking only at shape and type.
_FREE |= {"view_as", "expand_as", "reshape_as", "broadcast_tensors", "result_type", "is_same_size", "is_set_to"}
# They change their second and third operand without counting it as a change.
_CHANGES_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_BY_ELEMENT = ("_foreach_", "_fused_", "_amp_foreach_")


class GlueMode(TorchFunctionMode):
    """While active, moves the operands of each torch function to one place.

    An `autograd.Function` is seen only from inside: each operation of its `forward` is glue. Its gradients are its own
    business, so give it inputs on one device.

    Args:
        locator: knows where tensors are and sends them.
        root: the model, whose registered tensors are not moved.
    """

    def __init__(self, locator: Locator, root: nn.Module) -> None:
        super().__init__()
        self._locator = locator
        self._root = root
        self._buffers: dict[int, Tensor] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _BACKWARD:
            return _run_backward(self, func, args, kwargs)
        if name in _FREE and func != _SET_GRADIENT:
            return func(*args, **kwargs)
        placed = self._placed((*args, *kwargs.values()))
        if len({place for _, place in placed}) < 2:
            return func(*args, **kwargs)
        if name.startswith(_BY_ELEMENT):
            return func(*self._side_by_side(args), **kwargs)
        mover = Mover(self._locator, self._anchor(func, name, placed, args, kwargs))
        args, kwargs = mover.move((args, kwargs))
        return _with_changes_in_place(mover, func(*args, **kwargs))

    def _placed(self, values: Sequence[Any]) -> list[tuple[Tensor, Place]]:
        place_of = self._locator.place_of
        return [(tensor, place) for tensor in _tensors(values) if (place := place_of(tensor)) is not None]

    def _anchor(
        self,
        func: Any,
        name: str,
        placed: list[tuple[Tensor, Place]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Place:
        changed = [kwargs.get("out")]
        if args and (func == _SET_GRADIENT or _in_place(name)):
            changed.append(args[0])
        if name in _CHANGES_STATISTICS:
            changed += [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
        for _, place in self._placed(changed):
            return place
        home = [place for tensor, place in placed if isinstance(tensor, nn.Parameter)]
        home += [place for tensor, place in placed if self._is_buffer(tensor)]
        return home[0] if home else placed[0][1]

    def _is_buffer(self, tensor: Tensor) -> bool:
        if self._buffers is None:  # held, so that no other tensor can have the id of one of them
            self._buffers = {id(buffer): buffer for buffer in self._root.buffers()}
        return id(tensor) in self._buffers

    def _side_by_side(self, args: tuple[Any, ...]) -> list[Any]:
        """Operations on lists work element by element: only equal positions have to be at one place."""
        places = [self._locator.place_of(tensor) for tensor in args[0]]
        return [args[0], *(self._each_at(places, value) for value in args[1:])]

    def _each_at(self, places: list[Place | None], value: Any) -> Any:
        if isinstance(value, Tensor) and len(set(places)) == 1:
            return self._at(places[0], value)
        if isinstance(value, (list, tuple)) and len(value) == len(places):
            return [self._at(place, item) for place, item in zip(places, value, strict=True)]
        return value

    def _at(self, place: Place | None, value: Any) -> Any:
        return value if place is None else Mover(self._locator, place).move(value)


_SET_GRADIENT = gradient_setter()


class _Asked(threading.local):
    """The glue under which this thread has asked for a backward."""

    mode: GlueMode | None = None


_asked = _Asked()


def _run_backward(mode: GlueMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ask for a backward: torch takes a mode off while it handles a function, but what the user's hooks do is glue."""
    _asked.mode = mode
    try:
        return func(*args, **kwargs)
    finally:
        _asked.mode = None


@contextmanager
def _glue_in_backward() -> Iterator[None]:
    mode, _asked.mode = _asked.mode, None
    if mode is None:
        yield
        return
    with _active(mode):
        yield


def _with_changes_in_place(mover: Mover, result: Any) -> Any:
    """Bring what an operation changed in copies, such as running statistics, back to their sources."""
    for source, sent in mover.changed_in_place():
        source.copy_(sent)
        if result is sent:
            result = source
    return result


def _in_place(name: str) -> bool:
    """Whether a torch function of this name changes its first argument (`add_`, `__iadd__`, `__setitem__`)."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _tensors(values: Sequence[Any], depth: int = 2) -> Iterator[Tensor]:
    """The tensors among `values` and in lists, tuples and dicts nested up to `depth` in them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, (tuple, list)):
            yield from _tensors(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _tensors(list(value.values()), depth - 1)


@contextmanager
def glue(locator: Locator, root: nn.Module) -> Iterator[None]:
    """Run the user's operations outside blocks where their operands are.

    Example:
        >>> with glue(locator, module):          # doctest: +SKIP
        ...     loss = module.training_step(batch, 0)

    Args:
        locator: knows where tensors are and sends them.
        root: the model, whose registered tensors are not moved.
    """
    with _active(GlueMode(locator, root)):
        yield


@contextmanager
def _active(mode: GlueMode) -> Iterator[None]:
    if _current() is not None:  # a step that calls another step
        yield
        return
    call_at_checkpoint(_remembering_glue)
    call_around_backward(_glue_in_backward)
    insert_function_mode(mode, above=0)
    try:
        yield
    finally:
        remove_function_mode(mode)  # wherever it is: an interrupt may have left others above it


def _current() -> GlueMode | None:
    # Asked of torch, not kept here: autograd's threads inherit the modes of the thread that asked for the backward.
    return next((mode for mode in reversed(function_modes()) if isinstance(mode, GlueMode)), None)


def _remembering_glue(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs under the present glue when activation checkpointing calls it again in backward."""
    mode = _current()
    return function if mode is None else partial(_run_under, mode, function)


def _run_under(mode: GlueMode, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with _active(mode):
        return function(*args, **kwargs)


class Suspended(NamedTuple):
    """Glue that is off while a block runs, and how many function modes were entered after it.

    Attributes:
        mode: that is off.
        above: how many are above its place.
    """

    mode: GlueMode
    above: int


def suspend() -> Suspended | None:
    """Take the glue off while a block runs, since inside it torch works undisturbed; returns what `resume` needs."""
    mode = _current()
    above = None if mode is None else remove_function_mode(mode)
    return None if mode is None or above is None else Suspended(mode, above)


def resume(suspended: Suspended | None) -> None:
    """Put the glue back after a block has run.

    Args:
        suspended: what `suspend` returned.
    """
    if suspended is not None:
        insert_function_mode(suspended.mode, suspended.above)
