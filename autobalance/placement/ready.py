"""Since when the inputs of a suspended micro-batch have been computed.

A copy waits for the stream that computes its source. While a micro-batch is suspended at the boundary of two stages,
others launch work on that stream, which its inputs do not need: an event of the moment of suspension spares the copy
the wait for it. The event is right only for what was computed by then, so that it counts for the tensors that the block
was given before the suspension, and only if nobody has changed them since.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import is_fake, version


class _Waiting(threading.local):
    """What this thread's call of a block was given, and events by device if it has been suspended since."""

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[Tensor, int]] = {}
        self.events: dict[torch.device, Any] = {}
        self.gradient: tuple[Tensor, int, Any] | None = None


_waiting = _Waiting()


@contextmanager
def awaiting(inputs: Iterable[Tensor]) -> Iterator[None]:
    """Until the end, this thread launches nothing but copies of these tensors, but may be suspended before.

    Example:
        >>> with awaiting(tensors):          # doctest: +SKIP
        ...     visitor.arrive(block)        # may call `mark_ready`, then let other threads run
        ...     moved = mover.move(values)

    Args:
        inputs: what a block was given and has to be sent to it.
    """
    before = _waiting.inputs, _waiting.events
    _waiting.inputs = {
        id(tensor): (tensor, version(tensor))
        for tensor in inputs
        if not (tensor.is_inference() or is_fake(tensor) or tensor.is_cpu)
    }
    _waiting.events = {}
    try:
        yield
    finally:
        _waiting.inputs, _waiting.events = before


def mark_ready() -> None:
    """Note that the inputs which this thread waits with need nothing that is launched from now on.

    To be called in the thread of a micro-batch just before it is suspended. Without it, or where the thread waits with
    no inputs, copies wait for all that was launched until they are, which is always right.
    """
    for device in {tensor.device for tensor, _ in _waiting.inputs.values()}:
        backend = torch.get_device_module(device)
        if hasattr(backend, "Stream"):
            _waiting.events[device] = backend.current_stream(device).record_event()


def ready_event(tensor: Tensor) -> Any:
    """The event after which a tensor is computed, or None if all that was launched on its device has to be awaited.

    Args:
        tensor: that is to be sent.
    """
    known, number = _waiting.inputs.get(id(tensor), (None, 0))
    if known is not tensor or version(tensor) != number:
        return None
    return _waiting.events.get(tensor.device)


def mark_gradient_ready(gradient: Tensor) -> None:
    """Note that a gradient, which this thread's backward sends next, needs nothing that is launched from now on.

    To be called just before the backward is suspended, as `mark_ready` in a forward.

    Args:
        gradient: that a hook of a copy was given.
    """
    if is_fake(gradient) or gradient.is_cpu:
        return
    backend = torch.get_device_module(gradient.device)
    if hasattr(backend, "Stream"):
        event = backend.current_stream(gradient.device).record_event()
        _waiting.gradient = gradient, version(gradient), event


def gradient_event(gradient: Tensor) -> Any:
    """The event after which a gradient is computed, or None if all that was launched on its device has to be awaited.

    Args:
        gradient: that is to be sent back.
    """
    marked, _waiting.gradient = _waiting.gradient, None
    if marked is None or marked[0] is not gradient or marked[1] != version(gradient):
        return None
    return marked[2]
