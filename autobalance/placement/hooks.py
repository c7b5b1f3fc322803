"""What happens at a block's door: inputs move in, the glue is off inside, changes to the caller's containers are carried back.

The hooks are partials of functions of this module, so that a hooked model can be copied and pickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from autobalance.placement import glue
from autobalance.placement.locate import Locator, Place
from autobalance.placement.move import Mover

Remove = Callable[[], None]


@dataclass
class Door:
    """A block's place and the way there; one per block, shared by its modules and methods.

    Attributes:
        name: the block's name, for errors.
        place: where the block is.
        locator: knows where tensors are and sends them.
    """

    name: str
    place: Place
    locator: Locator
    _visits: _Visits = field(default_factory=lambda: _Visits(), repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Door:
        return Door(self.name, self.place, self.locator)

    def __reduce__(self) -> tuple[Any, ...]:
        return Door, (self.name, self.place, self.locator)


class _Visits(threading.local):
    """Calls of the block that have not returned, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Visit] = []


@dataclass
class _Visit:
    mover: Mover
    suspended: glue.Suspended | None
    token: Any


def enter_block(door: Door, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: move what the block is given to the block's place."""
    visit = _Visit(Mover(door.locator, door.place), glue.suspend(), door.locator.enter(door.place))
    door._visits.stack.append(visit)  # before anything can fail: `leave_block` is called in any case
    moved: tuple[Any, Any] = visit.mover.move((args, kwargs))
    return moved


def leave_block(door: Door, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Forward hook, also after an error: put everything back as the caller knows it."""
    visit = door._visits.stack.pop()
    door.locator.leave(visit.token)
    glue.resume(visit.suspended)
    for tensor in visit.mover.changed_in_place():
        door.locator.changed_in_place(tensor, door.place, door.name)
    visit.mover.carry_back()
    return visit.mover.restore(output)


def hook_block(door: Door, module: nn.Module) -> list[Remove]:
    """Install the door on `module`; returns functions that take it off again.

    Args:
        door: the block's place.
        module: the block, or one of its modules.
    """
    before = module.register_forward_pre_hook(partial(enter_block, door), prepend=True, with_kwargs=True)
    after = module.register_forward_hook(partial(leave_block, door), with_kwargs=True, always_call=True)
    return [before.remove, after.remove]


def call_method(door: Door, module: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run method `name` of the block's class as if it were its forward."""
    args, kwargs = enter_block(door, module, args, kwargs)
    output = None
    try:
        output = getattr(type(module), name)(module, *args, **kwargs)
    finally:
        output = leave_block(door, module, args, kwargs, output)
    return output


def hook_method(door: Door, module: nn.Module, name: str) -> Remove:
    """Install the door on a method other than `forward`.

    Args:
        door: the block's place.
        module: the block.
        name: of the method, as its class defines it.

    Raises:
        AttributeError: if the class has no such method.
    """
    if not callable(getattr(type(module), name, None)):
        raise AttributeError(
            f"`forward_methods()` names {name!r} for block {door.name!r}, but {type(module).__name__} has no such method."
        )
    setattr(module, name, partial(call_method, door, module, name))
    return partial(module.__dict__.pop, name, None)
