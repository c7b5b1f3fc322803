"""What a step gives to a module, and the modes around it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autobalance.measuring.courier import all_tensors, containers


@dataclass(frozen=True)
class Call:
    """One call of a module, as a step makes it.

    Attributes:
        name: of the method, mostly "forward".
        args, kwargs: on the host; real numbers.
        grad: whether the call is to be differentiated.
        autocast: to which type operations are cast; None: not at all.
        on_host: those of its tensors, by their number in `all_tensors`, that are on the host in a run on a device too,
            such as the lengths of a packed sequence.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool = True
    autocast: torch.dtype | None = None
    on_host: frozenset[int] = frozenset()

    @classmethod
    def under_way(
        cls,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device_type: str,
        is_on_host: Callable[[Tensor], bool],
    ) -> Call:
        """The call that is under way on a device of this type, with the modes that are active around it.

        Args:
            name: of the method.
            args, kwargs: what it is called with.
            device_type: of the device that computes.
            is_on_host: whether a tensor would be on the host.
        """
        cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        given = enumerate(all_tensors((args, kwargs)))
        on_host = frozenset(number for number, tensor in given if is_on_host(tensor))
        return cls(name, args, kwargs, torch.is_grad_enabled(), cast, on_host)

    @contextmanager
    def modes(self, device_type: str) -> Iterator[None]:
        """The modes of the call, for a device of another type."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(device_type, dtype=self.autocast))
            yield


def with_containers_of_its_own(call: Call) -> Call:
    """The call with copies of the containers, so that a module may put things into them again and again.

    Args:
        call: of a module.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in all_tensors((call.args, call.kwargs))}
    if not containers((call.args, call.kwargs)):
        return call
    try:
        args, kwargs = copy.deepcopy((call.args, call.kwargs), memo)
    except Exception:  # something that refuses to be copied, which no block then changes unseen
        return call
    return replace(call, args=args, kwargs=kwargs)
