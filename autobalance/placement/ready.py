"""Since when tensors that are sent to other devices have been computed.

A copy waits for the stream that computes its source. By the time it is launched, other micro-batches have launched work
on that stream, which the source does not need: an event of the moment at which it was there spares the copy the wait
for that work. Events are kept for what waits while a micro-batch is suspended at the boundary of two stages, until the
end of that micro-batch, and for batches, which are there before a step begins. They are right only as long as nobody
changes the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autobalance.compat import is_fake, version


class _Marks:
    """Events by tensor, each with the version of the tensor that it is about."""

    def __init__(self) -> None:
        self._events: Any = WeakTensorKeyDictionary()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors, unless they are marked already, by one event of now for each of their devices."""
        now: dict[torch.device, Any] = {}
        for tensor in tensors:
            if self.event(tensor) is None and _has_stream(tensor):
                if tensor.device not in now:
                    now[tensor.device] = _event_of_now(tensor)
                self._events[tensor] = version(tensor), now[tensor.device]

    def event(self, tensor: Tensor) -> Any:
        """The event of a tensor that has not changed since; None if there is none."""
        number, event = self._events.get(tensor, (None, None))
        return None if event is None or number != version(tensor) else event


class _Waiting(threading.local):
    """What this thread's call of a block was given, and what is marked until the thread's micro-batch ends."""

    def __init__(self) -> None:
        self.inputs: tuple[Tensor, ...] = ()
        self.marks = _Marks()
        self.gradient: tuple[Tensor, int, Any] | None = None


_waiting = _Waiting()
_batches: list[_Marks] = []


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
    before, _waiting.inputs = _waiting.inputs, tuple(inputs)
    try:
        yield
    finally:
        _waiting.inputs = before


def mark_ready() -> None:
    """Note that the inputs which this thread waits with need nothing that is launched from now on.

    To be called in the thread of a micro-batch, inside of `marks_forgotten`, just before it is suspended. Without it
    copies wait for all that was launched until they are, which is always right.
    """
    _waiting.marks.add(_waiting.inputs)


@contextmanager
def marks_forgotten() -> Iterator[None]:
    """At the end, forget what this thread has marked inside: it works for another micro-batch next."""
    before, _waiting.marks = _waiting.marks, _Marks()
    try:
        yield
    finally:
        _waiting.marks, _waiting.gradient = before, None


@contextmanager
def ready(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, copies of these tensors need nothing that is launched from now on, in any thread.

    Example:
        >>> with ready(batch):               # doctest: +SKIP
        ...     pipeline.train(4, forward, backward)

    Args:
        tensors: that are computed, or on their way to their devices, such as those of a batch.
    """
    marks = _Marks()
    marks.add(tensors)
    _batches.append(marks)
    try:
        yield
    finally:
        _batches.remove(marks)


def ready_event(tensor: Tensor) -> Any:
    """The event after which a tensor is computed, or None if all that was launched on its device has to be awaited.

    Args:
        tensor: that is to be sent.
    """
    if not _has_stream(tensor):
        return None
    found = (marks.event(tensor) for marks in (_waiting.marks, *_batches))
    return next((event for event in found if event is not None), None)


def mark_gradient_ready(gradient: Tensor) -> None:
    """Note that a gradient, which this thread's backward sends next, needs nothing that is launched from now on.

    To be called just before the backward is suspended, as `mark_ready` in a forward.

    Args:
        gradient: that a hook of a copy was given.
    """
    if _has_stream(gradient):
        _waiting.gradient = gradient, version(gradient), _event_of_now(gradient)


def gradient_event(gradient: Tensor) -> Any:
    """The event after which a gradient is computed, or None if all that was launched on its device has to be awaited.

    Args:
        gradient: that is to be sent back.
    """
    marked, _waiting.gradient = _waiting.gradient, None
    if marked is None or marked[0] is not gradient or marked[1] != version(gradient):
        return None
    return marked[2]


def _has_stream(tensor: Tensor) -> bool:
    """Whether a tensor's device works in streams, and the tensor counts how often it is changed."""
    if tensor.is_cpu or is_fake(tensor) or tensor.is_inference():
        return False
    return hasattr(torch.get_device_module(tensor.device), "Stream")


def _event_of_now(tensor: Tensor) -> Any:
    return torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()
