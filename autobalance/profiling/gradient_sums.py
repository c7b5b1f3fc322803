"""How autograd adds up the gradients of a tensor that is used more than once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autobalance import compat
from autobalance.placement.couriers import is_sending
from autobalance.profiling.operands import operands_in
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.virtual import is_crossing, ways_back_from


def _adds_nothing(node: Any) -> bool:
    """Whether the backward of an autograd node only copies."""
    return is_crossing(node) or is_sending(node)


class GradientSums:
    """Follows gradients from operation to operation, and notes where they meet.

    Args:
        tracer: is told of sums.
        adds_in_place: whether sums are made in place where autograd does so on the device itself.
    """

    def __init__(self, tracer: Tracer, adds_in_place: bool) -> None:
        self._tracer = tracer
        self._adds_in_place = adds_in_place

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of one operation."""
        if self._tracer.fans.is_spread:
            self._follow(func, args, kwargs)
        if compat.accumulates_gradients(func, args, kwargs, _adds_nothing):
            self._add(args[0], args[1], result)

    def _add(self, gradient: Tensor, other: Tensor, result: Tensor) -> None:
        """Autograd adds to a gradient in place if nobody else holds it (torch/csrc/autograd/input_buffer.cpp,
        accumulate), but never to a tensor of a subclass or under a dispatch mode, as all are in a trace."""
        tracer = self._tracer
        in_place = self._adds_in_place and compat.is_last_reference(gradient)
        earlier, later = tracer.find(gradient.untyped_storage()), tracer.find(other.untyped_storage())
        if in_place and gradient.shape == result.shape:
            tracer.written_to(gradient.untyped_storage(), result.untyped_storage())
        total = tracer.find(result.untyped_storage())
        if not tracer.fans.is_spread or earlier is None or later is None or total is None:
            return
        node = compat.current_node()
        ways = [way for way in ways_back_from(node) if way.shape == tuple(result.shape)]
        for way in ways[:1]:
            way.add(compat.number_of(node), earlier, later, total)
        tracer.fans.meet(earlier, later, total)

    def _follow(self, func: Any, args: Any, kwargs: Any) -> None:
        node, tracer = compat.current_node(), self._tracer
        if node is None:
            return
        ways = list(ways_back_from(node))
        for way in ways:
            way.comes(compat.number_of(node), len(tracer.events))
        if ways and compat.accumulates_gradients(func, args, kwargs, _adds_nothing):
            return
        for tensor in operands_in(args):
            if (read := tracer.find(tensor.untyped_storage())) is not None:
                tracer.fans.read(read, len(tracer.events))
