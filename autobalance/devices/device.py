"""A device as the planner sees it: numbers, no handle."""

from __future__ import annotations

from dataclasses import dataclass

# Round figures of a middling data-centre GPU, for devices of which only the capacity is said. They only scale
# predicted times, never a decision about memory.
PLAIN_FLOPS = 1e13
PLAIN_BANDWIDTH = 1e12
PLAIN_LINK = 2.5e10


@dataclass(frozen=True)
class Device:
    """One device: what it can hold and how fast it is.

    Example:
        >>> Device("my card", capacity=8 * 2**30)

    Attributes:
        name: as tables and errors show it: `cuda:1`, `A100-80GB`, `device 0`.
        capacity: bytes that this process may hold on it.
        flops: floating point operations per second in float32.
        bandwidth: bytes per second between its memory and its cores.
        link: bytes per second to another device, one way.
        real: True for hardware that is present, where context and workspaces take memory beside the tensors.
    """

    name: str
    capacity: int
    flops: float = PLAIN_FLOPS
    bandwidth: float = PLAIN_BANDWIDTH
    link: float = PLAIN_LINK
    real: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int):
            raise TypeError(f"device {self.name!r} has the capacity {self.capacity!r}; it is a whole number of bytes")
        if self.capacity < 0:
            raise ValueError(f"device {self.name!r} has a capacity of {self.capacity} bytes; it must not be negative")
        for what in ("flops", "bandwidth", "link"):
            rate = getattr(self, what)
            if not rate > 0:
                raise ValueError(f"device {self.name!r} has {what}={rate}; rates must be above 0")
