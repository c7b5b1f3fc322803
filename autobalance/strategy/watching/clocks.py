"""Which clock a step is timed by: simulated devices have one of their own, which may not run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Clock(Enum):
    """What tells the time of a step, in words that follow it."""

    WALL = "by the host's clock, when all devices were done"
    VIRTUAL = "by the virtual clock of the simulated devices"
    COMPUTING = (
        "by the host's clock, which says how long it computes for simulated devices, not how long they would take; "
        "torch.simulated.reset_clock() before the run starts a clock of theirs"
    )

    @property
    def is_of_devices(self) -> bool:
        """Whether its times are those that the devices of a plan take."""
        return self is not Clock.COMPUTING


@dataclass(frozen=True)
class Instant:
    """A moment by one clock.

    Attributes:
        clock: which one.
        seconds: that it shows.
    """

    clock: Clock
    seconds: float

    def until(self, later: Instant) -> float | None:
        """Seconds from here to a later moment; None where another clock runs then, or the same was started again.

        Example:
            >>> Instant(Clock.WALL, 2.0).until(Instant(Clock.WALL, 3.5))
            1.5

        Args:
            later: the other moment.
        """
        seconds = later.seconds - self.seconds
        return seconds if later.clock is self.clock and seconds >= 0 else None


def now(devices: Sequence[torch.device]) -> Instant:
    """This moment by the clock of the devices: the virtual one of simulated devices where it runs, else the host's.

    Example:
        >>> now([torch.device("cpu")]).clock
        <Clock.WALL: "by the host's clock, when all devices were done">

    Args:
        devices: of one kind; CUDA devices are waited for.
    """
    backend = torch.get_device_module(devices[0])
    if devices[0].type == "simulated":
        try:
            return Instant(Clock.VIRTUAL, float(backend.elapsed()))
        except RuntimeError:  # the clock was not started
            return Instant(Clock.COMPUTING, time.perf_counter())
    for device in devices if devices[0].type == "cuda" else ():
        backend.synchronize(device)
    return Instant(Clock.WALL, time.perf_counter())
