"""A function for every tensor in what a module is given or returns, whatever it is nested in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autobalance.placement.contents import Contents, is_atom, parts
from autobalance.placement.host_locator import HostLocator
from autobalance.placement.locate import Place
from autobalance.placement.move import Mover


class Courier(HostLocator):
    """Sends every tensor, wherever it is, by a function.

    Args:
        send: what becomes of a tensor.
    """

    def __init__(self, send: Callable[[Tensor], Tensor]) -> None:
        self._send = send

    def place_of(self, tensor: Tensor) -> Any:
        """Never where it has to go."""
        return self

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        """What the function makes of it."""
        return self._send(tensor)

    def send_object(self, value: Any, place: Place) -> Any:
        """The object with its tensors sent."""
        mover = Mover(self, place)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(value, name, mover.move(item))
        return value


def all_tensors(value: Any) -> list[Tensor]:
    """The tensors in anything that a module may return, in a fixed order.

    Args:
        value: of any kind.
    """
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    Mover(Courier(collect), "nowhere").move(value)
    return found


def containers(value: Any) -> list[Any]:
    """All that a module may put something into.

    Args:
        value: of any kind.
    """
    found, unread, seen = [], [value], set[int]()
    while unread:
        part = unread.pop()
        if id(part) in seen or is_atom(part) or isinstance(part, Tensor):
            continue
        seen.add(id(part))
        unread.extend(parts(part))
        if Contents.is_changeable(part):
            found.append(part)
    return found
