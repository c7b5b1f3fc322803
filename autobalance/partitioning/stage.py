"""One stage of a plan: consecutive blocks of one visit to a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks that a micro-batch runs through on one device.

    Example:
        >>> Stage(start=0, stop=3, device=1, in_flight=2).blocks
        range(0, 3)

    Attributes:
        start, stop: it holds the blocks `[start, stop)`, in call order.
        device: index of its device.
        in_flight: most micro-batches whose saved bytes it holds at once.
        forward_time, backward_time: seconds that a micro-batch takes on the device; what is computed again counts in
            the backward.
        receive_time: seconds of the transfers into it, of gradients that go back for them too.
        received: bytes of these transfers, for each micro-batch.
        holds: (device, seconds) for each point of its forward, after those seconds, at which the host waits for a
            device.
        launching: seconds that the host takes to launch the kernels of its forward and of its backward.
    """

    start: int
    stop: int
    device: int
    in_flight: int = 1
    forward_time: float = 0.0
    backward_time: float = 0.0
    receive_time: float = 0.0
    received: int = 0
    holds: tuple[tuple[int, float], ...] = ()
    launching: tuple[float, float] = (0.0, 0.0)

    @property
    def blocks(self) -> range:
        """Indices of its blocks."""
        return range(self.start, self.stop)

    @property
    def busy(self) -> float:
        """Seconds that its device works on a micro-batch, there and back."""
        return self.forward_time + self.backward_time

    @property
    def time(self) -> float:
        """Seconds of a micro-batch, there and back, transfers included."""
        return self.busy + self.receive_time
