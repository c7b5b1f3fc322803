"""What every device may hold: its capacity, less what the user or the hardware keeps back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from autobalance.devices.device import Device
from autobalance.units import format_size, parse_size

# What real devices need beside tensors: cuBLAS keeps 8 to 32 MiB per handle and stream, convolutions take workspaces,
# and kernels that are loaded later enlarge the context.
ALLOWANCE = 256 * 2**20
# The allocator cannot hand out everything that it reserves: 2.7 % and more above the tensors in replays of real traces.
FRAGMENTS = 0.03


def budgets_of(
    devices: Sequence[Device],
    max_memory: Mapping[int | str, int | str] | None = None,
    reserve: str | float = "auto",
) -> tuple[int, ...]:
    """Bytes that each device may hold.

    Example:
        >>> budgets_of(parse_devices("2x40GiB"), max_memory={0: "10GiB"})

    Args:
        devices: the devices.
        max_memory: in accelerate's form, position in `devices` -> size: the device holds no more than that.
        reserve: kept back from each device: bytes, a size in words, a fraction below 1; `"auto"`: on real devices an
            allowance for context and workspaces plus 3 %, nothing elsewhere.

    Returns:
        One budget for each device.

    Raises:
        TypeError: no mapping, or no size.
        ValueError: a key that is no position, a size that is none, or a reserve that leaves nothing.
    """
    _refuse_no_mapping(max_memory)
    limits = dict(max_memory or {})
    for key in limits:
        if key in ("cpu", "disk"):
            raise ValueError(
                f"max_memory has the key {key!r}: nothing is offloaded without offload=True; leave it out, and a model "
                "that does not fit is an error instead of a slow run"
            )
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < len(devices):
            raise ValueError(
                f"max_memory has the key {key!r}; keys are positions in the list of devices, here 0 to "
                f"{len(devices) - 1}"
            )
    budgets = []
    for position, device in enumerate(devices):
        capacity = min(device.capacity, parse_size(limits.get(position, device.capacity)))
        kept = _reserve(device, capacity, reserve)
        if reserve != "auto" and kept >= capacity > 0:
            raise ValueError(
                f"reserve={reserve!r} keeps {format_size(kept)} of device {position} ({device.name}), which has "
                f"{format_size(capacity)}: nothing is left for the model"
            )
        budgets.append(max(0, capacity - kept))
    return tuple(budgets)


def host_budget(max_memory: Mapping[int | str, int | str] | None) -> int:
    """Bytes of host memory that a plan may use: as `max_memory` says of `"cpu"`, else what is free now.

    Example:
        >>> host_budget({"cpu": "64GiB"})
        68719476736

    Args:
        max_memory: bytes, or words, by index of a device or "cpu".
    """
    given = (max_memory or {}).get("cpu")
    return parse_size(given) if given is not None else int(psutil.virtual_memory().available)


def without_host(max_memory: Mapping[int | str, int | str] | None) -> Mapping[int | str, int | str] | None:
    """What `max_memory` says of devices.

    Example:
        >>> without_host({0: "10GiB", "cpu": "64GiB"})
        {0: '10GiB'}

    Args:
        max_memory: as for `host_budget`.

    Raises:
        ValueError: it limits a disk, of which nothing is used.
    """
    _refuse_no_mapping(max_memory)
    limits = {key: size for key, size in (max_memory or {}).items() if key != "cpu"}
    if "disk" in limits:
        raise ValueError("max_memory has the key 'disk': offload=True takes the host's memory, 'cpu', and no disk")
    return limits


def _refuse_no_mapping(max_memory: object) -> None:
    if max_memory is not None and not isinstance(max_memory, Mapping):
        raise TypeError(f"max_memory is a mapping such as {{0: '10GiB'}}, from positions to sizes, not {max_memory!r}")


def _reserve(device: Device, capacity: int, reserve: str | float) -> int:
    if reserve == "auto":
        return min(capacity, ALLOWANCE + int(FRAGMENTS * capacity)) if device.real else 0
    if isinstance(reserve, float) and 0 < reserve < 1:
        return int(reserve * capacity)
    return parse_size(reserve)
