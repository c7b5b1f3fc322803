"""The public entry: how many devices there are, and how much memory each has."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from autobalance.devices.device import Device
from autobalance.simulated import backend, clock, installation, ledger

ENVIRONMENT_VARIABLE = "AUTOBALANCE_SIMULATE"


class Simulation:
    """Devices as `simulate` configured them; leaving it as a context manager brings the earlier ones back.

    A clock that was started inside (`torch.simulated.reset_clock`) is stopped then.

    Attributes:
        devices: what each can hold, and how fast it is by the clock.
        capacities: bytes of each device; None where there is no limit.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.capacities = tuple(device.capacity if device.capacity < sys.maxsize else None for device in devices)
        self._clock_before = clock.configure(self.devices)
        self._count_before = backend.device_count()
        backend.set_count(len(self.capacities))
        self._ledger_before = ledger.devices.configure(
            {index: size for index, size in enumerate(self.capacities) if size is not None}
        )

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        backend.set_count(self._count_before)
        ledger.devices.restore(self._ledger_before)
        clock.restore(self._clock_before)


def simulate(devices: str | int | Sequence[int | str | Device]) -> Simulation:
    """Configure devices that are not there: `simulated:0`, `simulated:1`, ... that compute on the CPU.

    Takes effect at once; used in a `with` statement, the earlier configuration is back afterwards.

    Example:
        >>> with autobalance.simulate("4x96MiB"):
        ...     torch.ones(2, device="simulated:3")

    Args:
        devices: words such as "4x96MiB", "2x40GiB,2x16GiB" or "4xA100-80GB"; a list of bytes, sizes or GPUs in words,
            or `Device`, for each device; or a number of devices without a memory limit. By the clock
            (`torch.simulated.elapsed`) those that are no GPU and no `Device` are as fast as an A100 with 40 GB, with
            the links of a common server.

    Returns:
        The configuration; a context manager.

    Raises:
        ValueError: the words cannot be read, or there are more than 127 devices or none.
        RuntimeError: CUDA is in use, or another backend has taken torch's one free device type.
    """
    configured = _devices(devices)
    if not 0 < len(configured) <= backend.MAX_DEVICES:
        raise ValueError(f"between 1 and {backend.MAX_DEVICES} devices can be simulated, not {len(configured)}")
    installation.install()
    return Simulation(configured)


def from_environment() -> Simulation | None:
    """Configure the devices that the environment variable AUTOBALANCE_SIMULATE names; None where it is not set.

    Raises:
        ValueError: its words cannot be read.
    """
    words = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not words:
        return None
    try:
        return simulate(words)
    except ValueError as error:
        raise ValueError(f"the environment variable {ENVIRONMENT_VARIABLE} is {words!r}: {error}") from None


def _devices(devices: str | int | Sequence[int | str | Device]) -> tuple[Device, ...]:
    if isinstance(devices, bool):
        raise TypeError(f"devices are words such as '4x96MiB', a list of bytes, or a number, not {devices!r}")
    if isinstance(devices, str) and devices.strip().isdigit():
        devices = int(devices)
    if isinstance(devices, int):
        return tuple(Device(f"device {index}", sys.maxsize) for index in range(devices))
    from autobalance.devices.words import parse_devices

    return parse_devices(devices)
