"""Time on devices that are not there: of the host that launches, of every stream, and of the links between devices.

The rules are those of CUDA's streams. Launching an operation takes the host a moment; the operation begins once it is
launched and everything before it on its stream is done. Nothing here waits in truth: only numbers move.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence

from autobalance.devices.device import Device
from autobalance.devices.links import LATENCY, link_between
from autobalance.simulated import ledger

Place = int | None
"""Index of a device; None is the host."""
StreamKey = tuple[int, int]
"""Index of a device, and number of one of its streams."""

DEFAULT_STREAM = 0

_PLAIN = Device("simulated", sys.maxsize)
_devices: tuple[Device, ...] = ()


class Clock:
    """Seconds since the clock was started, each on its own hand.

    Example:
        >>> clock = Clock()
        >>> clock.launch((0, DEFAULT_STREAM), seconds=1.0)
        >>> clock.latest
        1.000005

    Attributes:
        host: seconds at which the host launches next.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self._streams: dict[StreamKey, float] = {}
        self._links: dict[tuple[Place, Place], float] = {}

    @property
    def latest(self) -> float:
        """Seconds at which the last of all streams is done with what was launched."""
        return max(self._streams.values(), default=0.0)

    def time_of(self, stream: StreamKey) -> float:
        """Seconds at which a stream is done with what was launched on it."""
        return self._streams.get(stream, 0.0)

    def launch(self, stream: StreamKey, seconds: float) -> None:
        """One kernel.

        Args:
            stream: that it runs on.
            seconds: that the device works on it.
        """
        self.host += device_at(stream[0]).launch_time
        self._streams[stream] = max(self.time_of(stream), self.host) + seconds

    def copy(self, source: StreamKey, target: StreamKey, nbytes: int) -> None:
        """A copy between two devices, which holds up a stream on both: it reads there and writes here.

        Args:
            source, target: stream of the device that is read, and of the one that is written.
            nbytes: that go over the link, which carries one copy at a time each way.
        """
        sender, receiver = device_at(source[0]), device_at(target[0])
        self.host += sender.launch_time
        ready = max(self.time_of(source), self.time_of(target))
        done = self._send(source[0], target[0], ready, nbytes / link_between(sender, receiver))
        self._streams[source] = self._streams[target] = done

    def copy_with_host(self, stream: StreamKey, nbytes: int, to_host: bool, host_waits: bool) -> None:
        """A copy from the host or to it.

        Args:
            stream: of the device, that it runs on.
            nbytes: that go over the link to the host.
            to_host: False for a copy to the device.
            host_waits: False where the host's memory is pinned and the host goes on at once.
        """
        device = device_at(stream[0])
        self.host += device.launch_time
        source, target = (stream[0], None) if to_host else (None, stream[0])
        done = self._send(source, target, self.time_of(stream), nbytes / device.host_link)
        self._streams[stream] = done
        if host_waits:
            self.host = done

    def _send(self, source: Place, target: Place, ready: float, seconds: float) -> float:
        link = source, target
        start = max(ready, self.host, self._links.get(link, 0.0))
        done = self._links[link] = start + LATENCY + seconds
        return done

    def hold(self, stream: StreamKey, until: float) -> None:
        """Let a stream begin nothing before a moment."""
        self._streams[stream] = max(self.time_of(stream), until)

    def hold_host(self, until: float) -> None:
        """Let the host launch nothing before a moment."""
        self.host = max(self.host, until)

    def hold_host_for(self, index: int) -> None:
        """Let the host wait for all streams of a device."""
        self.hold_host(max((time for stream, time in self._streams.items() if stream[0] == index), default=0.0))


_running: Clock | None = None
_times_traces = False


def running() -> Clock | None:
    """The clock, if it runs; a trace, whose operations are not those of a run, takes no time."""
    return None if _running is None or (ledger.is_tracing() and not _times_traces) else _running


@contextlib.contextmanager
def timing_traces() -> Iterator[None]:
    """Inside, traces take time as runs do: that of a placement, on fakes, tells how long a step of any size takes.

    Example:
        >>> with timing_traces():
        ...     profiler.forecast(plan.block_names, plan.assignment, plan.loose_map, plan.root, 4)
    """
    global _times_traces
    before, _times_traces = _times_traces, True
    try:
        yield
    finally:
        _times_traces = before


def reset_clock() -> None:
    """Start the clock of simulated devices, or start it again, at 0.

    Example:
        >>> torch.simulated.reset_clock()
        >>> trainer.fit(model)
        >>> torch.simulated.elapsed()
    """
    global _running
    _running = Clock()


def elapsed() -> float:
    """Seconds from `reset_clock` until the last simulated device is done with what was launched so far.

    Example:
        >>> torch.simulated.reset_clock()
        >>> _ = torch.ones(1024, 1024, device="simulated:0") + 1
        >>> torch.simulated.elapsed() > 0
        True

    Raises:
        RuntimeError: the clock was never started.
    """
    if _running is None:
        raise RuntimeError(
            "the clock of simulated devices is not running: it costs time on every operation, so that it starts with "
            "torch.simulated.reset_clock(); call that before what you want to time"
        )
    return _running.latest


def device_at(index: int) -> Device:
    """How fast a simulated device is, and what it is linked by.

    Args:
        index: of the device; of one that is not configured, it is a usual one.
    """
    return _devices[index] if index < len(_devices) else _PLAIN


def configure(devices: Sequence[Device]) -> tuple[tuple[Device, ...], Clock | None]:
    """Say how fast the devices are from now on.

    Args:
        devices: one for each simulated device; none: without a clock.

    Returns:
        What was so far, and the clock, for `restore`.
    """
    global _devices
    before = _devices, _running
    _devices = tuple(devices)
    return before


def restore(before: tuple[tuple[Device, ...], Clock | None]) -> None:
    """Bring back what `configure` returned; a clock that was started since then is stopped.

    Args:
        before: what `configure` returned.
    """
    global _devices, _running
    _devices, _running = before


class _Current(threading.local):
    """The stream that each device works on for a thread, where that is not the default one."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}


_current = _Current()


def current_stream(index: int) -> StreamKey:
    """The stream of a device on which this thread's operations run.

    Args:
        index: of the device.
    """
    return index, _current.numbers.get(index, DEFAULT_STREAM)


def set_current_stream(stream: StreamKey) -> None:
    """Let this thread's operations on the stream's device run on it.

    Args:
        stream: of the device.
    """
    index, number = stream
    _current.numbers[index] = number


@contextlib.contextmanager
def on_stream(stream: StreamKey) -> Iterator[None]:
    """Inside, this thread's operations on the stream's device run on it.

    Args:
        stream: of the device.
    """
    before = current_stream(stream[0])
    set_current_stream(stream)
    try:
        yield
    finally:
        set_current_stream(before)
