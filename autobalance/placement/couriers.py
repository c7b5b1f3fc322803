"""Copies between devices that overlap with what the devices compute.

A copy waits for its source, the destination waits for the copy, and nobody else for either. The gradient goes the same
way back.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import in_functional_transform, is_fake, is_node_of
from autobalance.placement.host_path import needs_host_path, through_host
from autobalance.placement.lanes import Lane, lane_between
from autobalance.placement.ready import gradient_event


def send(tensor: Tensor, place: torch.device, ready: Any = None, reader: Any = None) -> Tensor:
    """`tensor.to(place)`, part of the autograd graph, on streams of its own.

    Example:
        >>> there = send(hidden, torch.device("cuda", 1))  # doctest: +SKIP

    Args:
        tensor: of any kind, on any device.
        place: where the copy goes.
        ready: event after which `tensor` is computed; None: after all that was launched on its device so far.
        reader: stream that reads the copy, besides the destination's current one.

    Returns:
        The copy; the destination's current stream waits for it, the host does not.
    """
    if not _has_own_way(tensor, place):
        return tensor.to(place, non_blocking=True)
    if torch.is_grad_enabled() and tensor.requires_grad:
        sent: Tensor = Sending.apply(tensor, place, ready, reader)  # type: ignore[no-untyped-call]  # torch's own
        return sent
    return carry(tensor, place, ready, reader)


def _has_own_way(tensor: Tensor, place: torch.device) -> bool:
    """Whether `carry` can take a tensor: not from the host, nor one that is made of several or is being transformed."""
    return (
        tensor.device.type == place.type != "cpu"
        and tensor.layout is torch.strided
        and not hasattr(type(tensor), "__tensor_flatten__")
        and not in_functional_transform()
    )


class Sending(torch.autograd.Function):
    """A copy whose gradient comes back on streams of its own, too.

    The backward of `.to` would run on the streams that compute, and let each wait for the other.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, place: torch.device, ready: Any, reader: Any) -> Tensor:
        """Copy a tensor, and take note of where its gradient is to go."""
        ctx.set_materialize_grads(False)
        ctx.source, ctx.place, ctx.computing = tensor.device, place, _current_stream(tensor)
        return carry(tensor, place, ready, reader)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send the gradient back."""
        (gradient,) = gradients
        # Autograd works through a device's nodes in a thread that does not know the other devices' current streams.
        back = None
        if gradient is not None:
            back = send(gradient, ctx.source, gradient_event(gradient), reader=ctx.computing)
        return back, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Send a tangent along, where torch differentiates forward."""
        return None if tangents[0] is None else carry(tangents[0], ctx.place)


def is_sending(node: Any) -> bool:
    """Whether an autograd node sends a gradient back to another device.

    Args:
        node: of the graph.
    """
    return is_node_of(node, Sending)


def carry(tensor: Tensor, place: torch.device, ready: Any = None, reader: Any = None) -> Tensor:
    """A copy without autograd.

    Args:
        tensor: a strided one on a device.
        place: a device of the same type.
        ready, reader: as for `send`.
    """
    host = needs_host_path(tensor.device, place)
    lane = None if is_fake(tensor) else lane_between(tensor.device, place)
    if lane is None:
        return through_host(tensor, place) if host else _copied(tensor, place)
    backend = torch.get_device_module(place)
    readers = [backend.current_stream(place), *([] if reader is None else [reader])]
    lane.sending.wait_event(backend.current_stream(tensor.device).record_event() if ready is None else ready)
    with ExitStack() as both:
        both.enter_context(backend.stream(lane.sending))
        both.enter_context(backend.stream(lane.receiving))
        copied = through_host(tensor, place, lane) if host else _copied(tensor, place)
    for stream in readers:
        stream.wait_stream(lane.receiving)
    _hold_memory(tensor, copied, lane, readers)
    return copied


def _copied(tensor: Tensor, place: torch.device) -> Tensor:
    return tensor.to(place, non_blocking=True, copy=True)


def _hold_memory(tensor: Tensor, copied: Tensor, lane: Lane, readers: list[Any]) -> None:
    """Tell the allocator who else uses what memory: it gives it away again in the order of the stream that took it."""
    tensor.record_stream(lane.sending)
    for stream in readers:
        copied.record_stream(stream)


def _current_stream(tensor: Tensor) -> Any:
    backend = torch.get_device_module(tensor.device)
    return None if is_fake(tensor) or not hasattr(backend, "Stream") else backend.current_stream(tensor.device)
