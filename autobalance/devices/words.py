"""Devices in words: `"2x40GiB,2x16GiB"` and `"4xA100-80GB"`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autobalance.devices.detect import detect_devices
from autobalance.devices.device import Device
from autobalance.devices.table import GPUS, find_gpu
from autobalance.units import parse_size

_PART = re.compile(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", re.IGNORECASE)
_MOST = 4096


def parse_devices(devices: str | Sequence[int | float | str | Device] | None = None) -> tuple[Device, ...]:
    """Devices from words, a list of bytes, a list of devices, or the GPUs of this machine.

    Example:
        >>> [device.capacity for device in parse_devices("2x40GiB,16GiB")]
        [42949672960, 42949672960, 17179869184]

    Args:
        devices: `"4x96MiB"`, `"2x40GiB,2x16GiB"`, `"4xA100-80GB"`; a list of bytes, sizes in words or `Device`,
            which may be mixed; None for the CUDA GPUs of this machine.

    Returns:
        The devices in the given order.

    Raises:
        ValueError: the words are not understood, name no device, or None is given on a machine without a GPU.
        TypeError: an entry of a list is no size and no device.
    """
    if devices is None:
        return detect_devices()
    if isinstance(devices, Device):
        raise TypeError(f"devices is a list; for one device write [{devices.name!r}'s Device] or '1x80GiB'")
    if isinstance(devices, str):
        entries: list[int | float | str | Device] = []
        for part in devices.split(","):
            entries += _repeated(part, devices)
    elif isinstance(devices, Sequence) and not isinstance(devices, (bytes, bytearray)):
        entries = list(devices)
    else:
        raise TypeError(f"devices is words such as '4x80GiB', a list of bytes or a list of Device, not {devices!r}")
    if not entries:
        raise ValueError("no device is given; write for example '4x80GiB' or [80 * 2**30] * 4")
    return tuple(_device(entry, position) for position, entry in enumerate(entries))


def _repeated(part: str, whole: str) -> list[str]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"devices={whole!r} has an empty part; write for example '4x80GiB' or '2x40GiB,2x16GiB'")
    count = int(match[1] or 1)
    if not 1 <= count <= _MOST:
        raise ValueError(f"devices={whole!r} asks for {count} devices; a count lies between 1 and {_MOST}")
    return [match[2]] * count


def _device(entry: int | float | str | Device, position: int) -> Device:
    if isinstance(entry, Device):
        return entry
    if isinstance(entry, str):
        gpu = find_gpu(entry)
        if gpu is not None:
            return Device(gpu.name, gpu.capacity, gpu.fp32, gpu.bandwidth, gpu.link)
        if entry.strip().isdecimal():
            number = entry.strip()
            raise ValueError(
                f"{entry!r} has no unit; write '{number}x80GiB' for {number} devices, '{number}GiB' for a size of each"
            )
        try:
            return Device(f"device {position}", parse_size(entry))
        except ValueError:
            known = ", ".join(gpu.name for gpu in GPUS)
            raise ValueError(
                f"{entry!r} is neither a size nor a known GPU; write for example '4x80GiB', or one of: {known}"
            ) from None
    return Device(f"device {position}", parse_size(entry))
