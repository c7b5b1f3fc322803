"""Copies between a device and pinned host memory, on streams of their own.

Memory on the device comes from the stream that computes, so that none is set aside for copies: a copy up begins when
what was launched before it is through. Pinned buffers are those of torch's caching host allocator, which hands them out
again once the copies that use them are through (`ATen/core/CachingHostAllocator.h`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autobalance.compat import is_fake


class _Streams(NamedTuple):
    """Of one device: to the host, and from it."""

    down: Any
    up: Any


_streams: dict[torch.device, _Streams] = {}


def _streams_of(device: torch.device) -> _Streams | None:
    """Streams for copies; None where the type of device has none."""
    backend = None if device.type == "cpu" else torch.get_device_module(device)
    if backend is None or not hasattr(backend, "Stream") or not backend.is_available():
        return None
    if device not in _streams:
        _streams[device] = _Streams(backend.Stream(device), backend.Stream(device))
    return _streams[device]


@dataclass(frozen=True, eq=False)
class Arrival:
    """A copy in host memory or on a device, which may be on its way there.

    Attributes:
        tensor: the copy.
        done: the event after which it is there; None: it is.
    """

    tensor: Tensor
    done: Any = None

    def wait(self) -> Tensor:
        """The copy: on the host, once it may be read; on a device, for what is launched there from now on."""
        if self.done is None:
            return self.tensor
        device = self.tensor.device
        if device.type == "cpu":
            self.done.synchronize()
        else:
            torch.get_device_module(device).current_stream(device).wait_event(self.done)
        return self.tensor


def to_host(tensor: Tensor) -> Arrival:
    """Begin to copy a tensor to pinned host memory; its own memory may be let go of at once.

    Example:
        >>> to_host(torch.ones(2)).wait()
        tensor([1., 1.])

    Args:
        tensor: on a device, without autograd.
    """
    streams, device = _streams_of(tensor.device), tensor.device
    if streams is None or is_fake(tensor) or tensor.layout is not torch.strided:
        return Arrival(tensor.to("cpu", copy=True))
    backend = torch.get_device_module(device)
    host = _pinned_like(tensor)
    streams.down.wait_stream(backend.current_stream(device))
    with backend.stream(streams.down):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(streams.down)
    return Arrival(host, streams.down.record_event())


def to_device(source: Arrival, device: torch.device) -> Arrival:
    """Begin to copy a tensor up to a device.

    Example:
        >>> to_device(to_host(torch.ones(2)), torch.device("cpu")).wait()
        tensor([1., 1.])

    Args:
        source: in host memory, or on its way there.
        device: where it is wanted.
    """
    streams, host = _streams_of(device), source.tensor
    if streams is None or is_fake(host):
        return Arrival(source.wait().to(device, copy=True))
    backend = torch.get_device_module(device)
    there = torch.empty_like(host, device=device)
    streams.up.wait_stream(backend.current_stream(device))
    if source.done is not None:
        streams.up.wait_event(source.done)
    with backend.stream(streams.up):
        there.copy_(host, non_blocking=True)
    there.record_stream(streams.up)
    return Arrival(there, streams.up.record_event())


def to_host_in_order(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """Copy a tensor to pinned host memory in the order of the current stream: nothing waits, and it may change next.

    Example:
        >>> to_host_in_order(torch.ones(2))
        tensor([1., 1.])

    Args:
        tensor: on any device.
        into: what an earlier call has returned and nobody needs any more, to be used again where it fits.

    Returns:
        The copy, for what is launched on that stream from now on; the host has to wait for it.
    """
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True)
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = _pinned_like(tensor)
    return into.copy_(tensor.detach(), non_blocking=True)


def _pinned_like(tensor: Tensor) -> Tensor:
    """An empty tensor in pinned host memory."""
    host = torch.empty_like(tensor, device="cpu")
    return torch.empty_like(host, pin_memory=True) if tensor.is_cuda else host.pin_memory()
