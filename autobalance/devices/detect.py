"""The GPUs of this machine and what this process can still use of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autobalance.devices.device import Device
from autobalance.devices.links import host_path
from autobalance.devices.table import device_of, recognise
from autobalance.measuring.calibration import Calibration, known_calibration

NOISE = 1.1
"""A measured link that is not faster than the slowest by this factor counts as equal, so that devices stay alike."""


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
            "this machine has no CUDA GPU; say which devices to plan for, such as devices='4x80GiB' or '4xA100-80GB' "
            "(--devices 4x80GiB on the command line)"
        )
    count = torch.cuda.device_count()
    wanted = range(count) if indices is None else indices
    missing = [index for index in wanted if not 0 <= index < count]
    if missing:
        raise ValueError(f"CUDA devices {missing} do not exist: this machine shows {count}, numbered from 0")
    measured = {index: known_calibration(f"cuda:{index}") for index in wanted}
    found = {index: _detect(index, measured[index]) for index in wanted}
    return tuple(_linked(index, found, measured) for index in wanted)


def _detect(index: int, measured: Calibration | None) -> Device:
    """A GPU by itself, as fast as it was measured, else as its datasheet says."""
    import torch

    # An allocation makes the context, whose memory would otherwise count as free.
    torch.empty(1, device=f"cuda:{index}")
    free, _ = torch.cuda.mem_get_info(index)
    cache = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    kind = torch.cuda.get_device_name(index)
    gpu = recognise(kind)
    name, capacity = f"cuda:{index}", free + cache
    device = Device(name, capacity, real=True) if gpu is None else device_of(gpu, name, capacity, real=True)
    if measured is not None and measured.flops and measured.bandwidth:
        return _as_measured(device, measured)
    if gpu is None:
        warnings.warn(
            f"{name} is a {kind}, whose speed autobalance does not know; predicted times assume a middling GPU until "
            f"`autobalance calibrate` has measured it",
            stacklevel=3,
        )
    return device


def _as_measured(device: Device, measured: Calibration) -> Device:
    flops = measured.flops.get("float32", max(measured.flops.values()))
    sheet = dict(device.rates) if device.kind else {}
    return replace(
        device,
        flops=flops,
        rates=tuple({**sheet, "float32": flops, **measured.flops}.items()),
        bandwidth=measured.bandwidth,
        link=min(measured.links.values(), default=device.link),
        launch_time=measured.launch_time or device.launch_time,
        efficiency=tuple(measured.efficiency.items()),
    )


def _linked(index: int, found: Mapping[int, Device], measured: Mapping[int, Calibration | None]) -> Device:
    """A GPU with its links to the others, where they are not like its slowest."""
    import torch

    device = found[index]
    others = [other for other in found if other != index]
    peers = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
    links = {}
    for other in others:
        ways = [
            known.links[f"{source}>{target}"]
            for source, target in ((index, other), (other, index))
            if (known := measured[source]) is not None and f"{source}>{target}" in known.links
        ]
        if ways and min(ways) > NOISE * device.link:
            links[found[other].name] = min(ways)
        elif not ways and peers and other not in peers:
            links[found[other].name] = host_path(device, found[other])
    return replace(device, links=tuple(links.items()), has_peers=bool(peers) if others else device.has_peers)
