"""What happens at a block's door: inputs move in, the glue is off inside, changes to containers are carried back.

The hooks are partials of functions of this module, so that a hooked model can be copied and pickled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn

from autobalance import compat
from autobalance.placement import glue
from autobalance.placement.locate import Locator, Place
from autobalance.placement.move import Mover
from autobalance.placement.ready import awaiting

Remove = Callable[[], None]


class Visitor(Protocol):
    """Is told of each visit of a block that the user's own code makes, outside other blocks and outside backwards."""

    @property
    def again(self) -> Visitor:
        """Who is told instead of visits in a backward, for which a checkpoint around blocks runs them again."""

    def arrive(self, block: int) -> None:
        """The block is called; nothing has moved yet.

        Args:
            block: its index.
        """

    def enter(self, block: int, args: Any, kwargs: Any) -> None:
        """The block runs next, with these arguments, which are where it is.

        Args:
            block: its index.
            args, kwargs: what it is given, in its place.
        """

    def leave(self, block: int) -> None:
        """The block has returned, or failed.

        Args:
            block: its index.
        """


@dataclass(frozen=True, eq=False)
class Door:
    """A block's place and the way there; one per block, shared by its modules and methods.

    Attributes:
        name: the block's name, for errors.
        place: where the block is.
        locator: knows where tensors are and sends them.
        exit: where the glue is to find the block's output; None: where the block is.
        block: the block's index.
        visitor: is told of visits.
    """

    name: str
    place: Place
    locator: Locator
    exit: Place | None = None
    block: int = -1
    visitor: Visitor | None = None

    def watch(self) -> Visitor | None:
        """Who is to be told of a visit that begins now."""
        if self.visitor is None or any(visit.visitor for visit in _visits.stack):
            return None
        return self.visitor.again if compat.in_backward() else self.visitor


@dataclass(frozen=True, eq=False)
class _Visit:
    """One call of a block that has not returned."""

    door: Door
    mover: Mover | None  # None: nothing moves
    visitor: Visitor | None
    suspended: glue.Suspended | None
    token: Any
    handled: BaseException | None

    def undo(self) -> None:
        if self.visitor is not None:
            self.visitor.leave(self.door.block)
        self.door.locator.leave(self.token)
        glue.resume(self.suspended)


class _Visits(threading.local):
    """Visits of this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Visit] = []

    def end(self, door: Door) -> _Visit | None:
        """Take the innermost visit of `door` off the stack, with those inside it that an interrupt cut short."""
        if all(visit.door is not door for visit in self.stack):
            return None
        while True:
            visit = self.stack.pop()
            visit.undo()
            if visit.door is door:
                return visit


_visits = _Visits()


def enter_block(door: Door, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: move what the block is given to the block's place.

    Args:
        door: of the block.
        module: that is called.
        args, kwargs: what it is called with.

    Returns:
        What it is given instead.
    """
    locator, visitor = door.locator, door.watch()
    if locator.nothing_moves and visitor is None:
        return args, kwargs
    mover = None if locator.nothing_moves else Mover(locator, door.place)
    with awaiting(() if mover is None or visitor is None else mover.to_send((args, kwargs))):
        if visitor is not None:
            visitor.arrive(door.block)
        token = locator.enter(door.place)
        # On the stack before anything else can fail: `leave_block` is called in any case.
        _visits.stack.append(_Visit(door, mover, visitor, glue.suspend(), token, sys.exc_info()[1]))
        if mover is not None:
            args, kwargs = mover.move((args, kwargs))
    if visitor is not None:
        visitor.enter(door.block, args, kwargs)
    return args, kwargs


def leave_block(door: Door, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Forward hook, also after an error: put everything back as the caller knows it.

    Args:
        door: of the block.
        module: that was called.
        args, kwargs: what it was called with.
        output: what it has returned; None after an error.

    Returns:
        What the caller is given.
    """
    locator = door.locator
    visit = None if locator.nothing_moves and door.visitor is None else _visits.end(door)
    if visit is None or visit.mover is None:  # another hook failed before the block was entered, or nothing moves
        return output
    has_failed = sys.exc_info()[1] is not visit.handled
    changed = visit.mover.changed_in_place()
    if changed and not has_failed:
        locator.changed_in_place(changed[0][0], door.place, door.name)
    caller = _visits.stack[-1].door if _visits.stack else None
    if caller is None:
        visit.mover.carry_back()
        restored = visit.mover.restore(output)
        return restored if door.exit is None else Mover(locator, door.exit).move(restored)
    if caller.place == door.place:
        visit.mover.carry_back()
        return visit.mover.restore(output)
    home = Mover(caller.locator, caller.place)  # called by a block, in which everything is at its place
    visit.mover.carry_back(home.move)
    return home.move(visit.mover.restore(output))


@contextmanager
def visits_ended() -> Iterator[None]:
    """End, on leaving, the visits that an interrupt cut short inside: torch calls no hook after one."""
    depth = len(_visits.stack)
    try:
        yield
    finally:
        while len(_visits.stack) > depth:
            _visits.stack.pop().undo()


@contextmanager
def inside(door: Door) -> Iterator[None]:
    """Be in a block without a call that comes through its door, as where its forward runs again in a backward.

    Args:
        door: of the block.
    """
    if door.locator.nothing_moves:
        yield
        return
    token = door.locator.enter(door.place)
    _visits.stack.append(_Visit(door, None, None, glue.suspend(), token, sys.exc_info()[1]))
    try:
        yield
    finally:
        _visits.end(door)


def hook_block(door: Door, module: nn.Module) -> list[Remove]:
    """Install the door on `module`; returns functions that take it off again.

    Args:
        door: the block's place.
        module: the block, or one of its modules.
    """
    before = module.register_forward_pre_hook(partial(enter_block, door), prepend=True, with_kwargs=True)
    after = module.register_forward_hook(partial(leave_block, door), with_kwargs=True, always_call=True)
    return [before.remove, after.remove]


def call_method(
    door: Door, module: nn.Module, name: str, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """Run method `name` of a block, or `inner` that was put in its place, as if it were its forward.

    Args:
        door: of the block.
        module: that has the method.
        name: of the method.
        inner: what stood in its place; None: the method of the class.
        args, kwargs: what it is called with.
    """
    output = None
    try:
        args, kwargs = enter_block(door, module, args, kwargs)
        output = run_method(module, name, inner, args, kwargs)
    finally:
        output = leave_block(door, module, args, kwargs, output)
    return output


def hook_method(door: Door, module: nn.Module, name: str) -> list[Remove]:
    """Install the door on a method other than `forward`; returns functions that take it off again.

    Args:
        door: the block's place.
        module: the block, or one of its modules.
        name: of the method.
    """
    return [replace_method(module, name, partial(call_method, door))]


def replace_method(module: nn.Module, name: str, call: Callable[..., Any]) -> Remove:
    """Let `call(module, name, inner, *args, **kwargs)` stand for a method of one module; returns what undoes that.

    `inner` is what the module's own attribute was, or None for the method of its class.

    Args:
        module: that has the method.
        name: of the method.
        call: what stands for it.
    """
    inner = module.__dict__.get(name)
    module.__dict__[name] = partial(call, module, name, inner)
    return partial(_put_method_back, module, name, inner)


def run_method(module: nn.Module, name: str, inner: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    """Call what `replace_method` replaced.

    Args:
        module: that has the method.
        name: of the method.
        inner: what stood in its place; None: the method of the class.
        args, kwargs: what it is called with.
    """
    if inner is not None:
        return inner(*args, **kwargs)
    return getattr(type(module), name)(module, *args, **kwargs)


def _put_method_back(module: nn.Module, name: str, inner: Callable[..., Any] | None) -> None:
    module.__dict__.pop(name, None)
    if inner is not None:
        module.__dict__[name] = inner
