"""The way from one device to another through the host's pinned memory, where there is none between the two."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from autobalance.placement.lanes import Lane

CHUNK = 8 * 2**20
"""Bytes on their way at once: the second copy of one chunk overlaps with the first copy of the next."""

_untrusted: set[tuple[torch.device, torch.device]] = set()


def needs_host_path(source: torch.device, target: torch.device) -> bool:
    """Whether copies from `source` to `target` go through the host.

    Args:
        source, target: devices of one type.
    """
    return (source, target) in _untrusted or _lacks_peer_access(source, target)


def distrust(source: torch.device, target: torch.device) -> None:
    """Send all copies from `source` to `target` through the host, for the rest of the process.

    Args:
        source: that copies come from.
        target: where they go.
    """
    _untrusted.add((source, target))


@cache
def _lacks_peer_access(source: torch.device, target: torch.device) -> bool:
    if source.type != "cuda" or source == target or not torch.cuda.is_available():  # fakes of GPUs need none
        return False
    return not torch.cuda.can_device_access_peer(source, target)


def through_host(tensor: Tensor, place: torch.device, lane: Lane | None = None, chunk: int = CHUNK) -> Tensor:
    """A copy of a tensor that goes through the host in chunks.

    Args:
        tensor: a strided one on a device.
        place: a device of the same type.
        lane: whose streams are current on the two devices; None where devices have no streams.
        chunk: bytes at once.

    Returns:
        The copy, laid out as `tensor.to(place)` lays it out.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    copied = torch.empty_like(tensor, device=place)
    if copied.stride() != tensor.stride():  # it has gaps, or elements in one place
        packed = torch.empty_strided(copied.shape, copied.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = packed.copy_(tensor)
    count = max(1, chunk // tensor.element_size())
    for part, target in zip(_in_memory(tensor).split(count), _in_memory(copied).split(count), strict=True):
        staged = part.to("cpu", non_blocking=True)  # torch pins what nobody waits for
        if lane is not None:
            lane.receiving.wait_stream(lane.sending)
        target.copy_(staged, non_blocking=True)
    return copied


def _in_memory(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of their addresses."""
    return tensor.as_strided((tensor.numel(),), (1,))
