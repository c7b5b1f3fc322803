"""The streams on which tensors go from one device to another.

torch copies between two devices on the streams that are current on both, and lets each of them wait for the other
before and after (aten/src/ATen/native/cuda/Copy.cu, copy_device_to_device). On the streams that compute, a stage would
stall until the next one has drained. On streams of the copies' own only copies wait for one another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Lane(NamedTuple):
    """The two streams of one direction between two devices.

    Attributes:
        sending: the source's.
        receiving: the destination's; the same one where both are one device.
    """

    sending: Any
    receiving: Any


_lanes: dict[tuple[torch.device, torch.device], Lane] = {}


def lane_between(source: torch.device, target: torch.device) -> Lane | None:
    """The lane from one device to another, or from a device to itself.

    Each direction of each pair has its own: in one that two pairs or directions shared, a copy whose source has long
    been computed would queue behind one whose source has not.

    Args:
        source: that is read.
        target: that is written; of the same type.

    Returns:
        The same lane for all copies of the process; None where the type of device has no streams.
    """
    backend = torch.get_device_module(source)
    if not hasattr(backend, "Stream"):
        return None
    if (source, target) not in _lanes:
        sending = backend.Stream(source)
        _lanes[source, target] = Lane(sending, sending if source == target else backend.Stream(target))
    return _lanes[source, target]
