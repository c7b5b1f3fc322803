"""Devices in words: `"2x40GiB,2x16GiB"`, `"4xA100-80GB"` and `"2 nodes x 8xH100"`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autobalance.devices.detect import detect_devices
from autobalance.devices.device import Device
from autobalance.devices.table import GPUS, device_of, find_gpu
from autobalance.units import parse_size

_PART = re.compile(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", re.IGNORECASE)
_NODES = re.compile(r"\s*(\d+)\s*nodes?\s*(?:[x*]|of)\s*(.*?)\s*", re.IGNORECASE)
_COMMA = re.compile(r",(?![^()]*\))")
"""A comma outside parentheses."""
_MOST = 4096


def parse_devices(devices: str | Sequence[int | float | str | Device] | None = None) -> tuple[Device, ...]:
    """Devices from words, a list of bytes, a list of devices, or the GPUs of this machine.

    Example:
        >>> [device.capacity for device in parse_devices("2x40GiB,16GiB")]
        [42949672960, 42949672960, 17179869184]
        >>> [device.node for device in parse_devices("2 nodes x (2xA100-80GB,40GiB)")]
        [0, 0, 0, 1, 1, 1]

    Args:
        devices: `"4x96MiB"`, `"2x40GiB,2x16GiB"`, `"4xA100-80GB"`, `"2 nodes x 8xH100"`; a list of bytes, sizes in
            words or `Device`, which may be mixed; None for the CUDA GPUs of this machine. A device of which only the
            size is said is as fast as an A100 with 40 GB, with the links of a common server.

    Returns:
        The devices in the given order. Without nodes in words, all are of node 0.

    Raises:
        ValueError: the words are not understood, name no device, or None is given on a machine without a GPU.
        TypeError: an entry of a list is no size and no device.
    """
    if devices is None:
        return detect_devices()
    if isinstance(devices, Device):
        raise TypeError(f"devices is a list; for one device write [{devices.name!r}'s Device] or '1x80GiB'")
    if isinstance(devices, str):
        entries: list[tuple[int, int | float | str | Device]] = list(_in_words(devices))
    elif isinstance(devices, Sequence) and not isinstance(devices, (bytes, bytearray)):
        entries = [(0, entry) for entry in devices]
    else:
        raise TypeError(f"devices is words such as '4x80GiB', a list of bytes or a list of Device, not {devices!r}")
    if not entries:
        raise ValueError("no device is given; write for example '4x80GiB' or [80 * 2**30] * 4")
    return tuple(_device(entry, position, node) for position, (node, entry) in enumerate(entries))


def _in_words(words: str) -> Iterator[tuple[int, str]]:
    """The node and the words of every device."""
    if words.count("(") != words.count(")"):
        raise ValueError(f"devices={words!r} opens {words.count('(')} parentheses and closes {words.count(')')}")
    groups = _COMMA.split(words)
    matches = [_NODES.fullmatch(group) for group in groups]
    lacking = [group.strip() for group, match in zip(groups, matches, strict=True) if match is None]
    if not any(matches):
        for group in groups:
            yield from ((0, entry) for entry in _repeated(group, words))
        return
    if lacking:
        raise ValueError(
            f"devices={words!r} does not say on which node {lacking[0]!r} is: write '2 nodes x (4xA100-80GB,4x40GiB)' "
            f"where every node has both, or '2 nodes x 4xA100-80GB, 1 node x 4x40GiB' where it is another node"
        )
    node = 0
    for match in matches:
        assert match is not None, "groups without nodes are refused above"
        count, held = _counted(match[1], words, "nodes"), match[2]
        inside = held[1:-1] if held.startswith("(") and held.endswith(")") else held
        each = [entry for part in inside.split(",") for entry in _repeated(part, words)]
        if count * len(each) > _MOST:
            raise ValueError(f"devices={words!r} asks for {count * len(each)} devices; up to {_MOST} are planned for")
        for _ in range(count):
            yield from ((node, entry) for entry in each)
            node += 1


def _repeated(part: str, whole: str) -> list[str]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"devices={whole!r} has an empty part; write for example '4x80GiB' or '2x40GiB,2x16GiB'")
    return [match[2]] * _counted(match[1] or "1", whole, "devices")


def _counted(number: str, whole: str, what: str) -> int:
    if not 1 <= int(number) <= _MOST:
        raise ValueError(f"devices={whole!r} asks for {int(number)} {what}; a count lies between 1 and {_MOST}")
    return int(number)


def _device(entry: int | float | str | Device, position: int, node: int) -> Device:
    if isinstance(entry, Device):
        return entry
    if isinstance(entry, str):
        gpu = find_gpu(entry)
        if gpu is not None:
            return device_of(gpu, node=node)
        if entry.strip().isdecimal():
            number = entry.strip()
            raise ValueError(
                f"{entry!r} has no unit; write '{number}x80GiB' for {number} devices, '{number}GiB' for a size of each"
            )
        try:
            return Device(f"device {position}", parse_size(entry), node=node)
        except ValueError:
            known = ", ".join(gpu.name for gpu in GPUS)
            raise ValueError(
                f"{entry!r} is neither a size nor a known GPU; write for example '4x80GiB', '2 nodes x 8xH100', or one "
                f"of: {known}"
            ) from None
    return Device(f"device {position}", parse_size(entry))
