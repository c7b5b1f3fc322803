"""A device as the planner sees it: numbers, no handle."""

from __future__ import annotations

from dataclasses import dataclass, fields

# A device of which only the capacity is said is as fast as an A100 with 40 GB (NVIDIA A100 datasheet, SXM4), whose
# rates time the rows of a profile that was made without a GPU. They only scale predicted times, never a decision about
# memory.
PLAIN_FLOPS = 19.5e12
PLAIN_RATES = (("float32", PLAIN_FLOPS), ("tf32", 156e12), ("bfloat16", 312e12), ("float16", 312e12))
PLAIN_BANDWIDTH = 1555e9
# Its links are those that every server has: PCI Express 4.0 with 16 lanes as it is reached (32e9 by specification), and
# a network of 100 Gbit/s.
PLAIN_LINK = 2.5e10
PLAIN_NETWORK = 1.25e10
LAUNCH_TIME = 5e-6
"""Seconds until the host can launch the next kernel: 3 to 10 microseconds from Python."""


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
        link: bytes per second to another device of its node, one way.
        real: True for hardware that is present, where context and workspaces take memory beside the tensors.
        rates: operations per second by kind of arithmetic (`"float32"`, `"tf32"`, `"bfloat16"`, `"float16"`); one that
            is not named runs as float32. Empty: all as `flops`, or, where that is not given either, as an A100's.
        node: number of the machine that it is in.
        network: bytes per second to a device of another node, one way.
        host_link: bytes per second to pinned memory of the host, one way.
        kind: name of the GPU as the table has it; empty where it is none of them.
        has_peers: whether it reads the memory of its neighbours itself; else what it sends them goes through the host.
        links: (name of another device of its node, bytes per second to it) where that differs from `link`.
        launch_time: seconds until the host can launch the next kernel on it.
        efficiency: (class of a block, share of `rates` that such blocks were measured to reach).
    """

    name: str
    capacity: int
    flops: float = PLAIN_FLOPS
    bandwidth: float = PLAIN_BANDWIDTH
    link: float = PLAIN_LINK
    real: bool = False
    rates: tuple[tuple[str, float], ...] = ()
    node: int = 0
    network: float = PLAIN_NETWORK
    host_link: float = PLAIN_LINK
    kind: str = ""
    has_peers: bool = True
    links: tuple[tuple[str, float], ...] = ()
    launch_time: float = LAUNCH_TIME
    efficiency: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int):
            raise TypeError(f"device {self.name!r} has the capacity {self.capacity!r}; it is a whole number of bytes")
        if self.capacity < 0:
            raise ValueError(f"device {self.name!r} has a capacity of {self.capacity} bytes; it must not be negative")
        for what in ("flops", "bandwidth", "link", "network", "host_link", "launch_time"):
            self._check_rate(what, getattr(self, what))
        for what in ("rates", "links", "efficiency"):
            for key, rate in getattr(self, what):
                self._check_rate(f"{what} of {key!r}", rate)
        if not self.rates:
            plain = PLAIN_RATES if self.flops == PLAIN_FLOPS else (("float32", self.flops),)
            object.__setattr__(self, "rates", plain)

    def _check_rate(self, what: str, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"device {self.name!r} has {what}={rate}; rates must be above 0")

    def rate(self, arithmetic: str) -> float:
        """Operations per second in one kind of arithmetic.

        Example:
            >>> Device("mine", 2**30, flops=1e13).rate("bfloat16")
            10000000000000.0

        Args:
            arithmetic: name of a dtype, such as "bfloat16".
        """
        return dict(self.rates).get(arithmetic, self.flops)

    @property
    def speed(self) -> tuple[object, ...]:
        """All its rates, and its node: equal for devices that work alike and, but for `links`, send alike."""
        apart = ("name", "capacity", "real", "links")
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in apart)
