"""The GPUs of this machine and what this process can still use of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from autobalance.devices.device import PLAIN_BANDWIDTH, PLAIN_FLOPS, PLAIN_LINK, Device
from autobalance.devices.table import recognise
from autobalance.measuring.calibration import known_calibration


def detect_devices(indices: Sequence[int] | None = None) -> tuple[Device, ...]:
    """The CUDA GPUs of this machine as devices.

    The capacity is what the driver reports as free once this process has its context there, plus what PyTorch's
    allocator keeps reserved without a tensor in it: own cache counts as free, what others hold counts as used.

    Example:
        >>> detect_devices([0, 1])

    Args:
        indices: CUDA indices; None for all that are visible.

    Returns:
        One `Device` for each index, named `cuda:N`.

    Raises:
        ValueError: there is no GPU, or an index that does not exist.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "this machine has no CUDA GPU; say which devices to plan for, such as devices='4x80GiB' or '4xA100-80GB'"
        )
    count = torch.cuda.device_count()
    wanted = range(count) if indices is None else indices
    missing = [index for index in wanted if not 0 <= index < count]
    if missing:
        raise ValueError(f"CUDA devices {missing} do not exist: this machine shows {count}, numbered from 0")
    return tuple(_detect(index) for index in wanted)


def _detect(index: int) -> Device:
    import torch

    # An allocation makes the context, whose memory would otherwise count as free.
    torch.empty(1, device=f"cuda:{index}")
    free, _ = torch.cuda.mem_get_info(index)
    cache = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    name = torch.cuda.get_device_name(index)
    gpu = recognise(name)
    measured = known_calibration(f"cuda:{index}")
    if measured is not None and measured.flops and measured.bandwidth:
        link = min(measured.links.values(), default=gpu.link if gpu is not None else PLAIN_LINK)
        flops = measured.flops.get("float32", max(measured.flops.values()))
        return Device(f"cuda:{index}", free + cache, flops, measured.bandwidth, link, real=True)
    if gpu is None:
        warnings.warn(
            f"cuda:{index} is a {name}, whose speed autobalance does not know; predicted times assume a middling GPU "
            f"until `autobalance calibrate` has measured it",
            stacklevel=3,
        )
        return Device(f"cuda:{index}", free + cache, PLAIN_FLOPS, PLAIN_BANDWIDTH, PLAIN_LINK, real=True)
    return Device(f"cuda:{index}", free + cache, gpu.fp32, gpu.bandwidth, gpu.link, real=True)
