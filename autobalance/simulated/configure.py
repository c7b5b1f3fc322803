"""The public entry: how many devices there are, and how much memory each has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

from autobalance.simulated import backend, installation, ledger

ENVIRONMENT_VARIABLE = "AUTOBALANCE_SIMULATE"


class Simulation:
    """Devices as `simulate` configured them; leaving it as a context manager brings the earlier ones back.

    Attributes:
        capacities: bytes of each device; None where there is no limit.
    """

    def __init__(self, capacities: Sequence[int | None]) -> None:
        self.capacities = tuple(capacities)
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


def simulate(devices: str | int | Sequence[int]) -> Simulation:
    """Configure devices that are not there: `simulated:0`, `simulated:1`, ... that compute on the CPU.

    Takes effect at once; used in a `with` statement, the earlier configuration is back afterwards.

    Example:
        >>> with autobalance.simulate("4x96MiB"):
        ...     torch.ones(2, device="simulated:3")

    Args:
        devices: words such as "4x96MiB" or "2x40GiB,2x16GiB", a list of bytes for each device, or a number of devices
            without a memory limit.

    Returns:
        The configuration; a context manager.

    Raises:
        ValueError: the words cannot be read, or there are more than 127 devices or none.
        RuntimeError: CUDA is in use, or another backend has taken torch's one free device type.
    """
    capacities = _capacities(devices)
    if not 0 < len(capacities) <= backend.MAX_DEVICES:
        raise ValueError(f"between 1 and {backend.MAX_DEVICES} devices can be simulated, not {len(capacities)}")
    installation.install()
    return Simulation(capacities)


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


def _capacities(devices: str | int | Sequence[int]) -> list[int | None]:
    if isinstance(devices, bool):
        raise TypeError(f"devices are words such as '4x96MiB', a list of bytes, or a number, not {devices!r}")
    if isinstance(devices, int):
        return [None] * devices
    if isinstance(devices, str) and devices.strip().isdigit():
        return [None] * int(devices)
    from autobalance.devices.words import parse_devices

    return [device.capacity for device in parse_devices(devices)]
