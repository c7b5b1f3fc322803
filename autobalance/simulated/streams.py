"""`torch.simulated.Stream` and `Event`: what `torch.cuda` has of these names, by the clock of simulated devices.

Code for copies beside the work, written for CUDA, runs on simulated devices as it is. While the clock is off, streams
and events do nothing: operations are done when they return.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import backend, clock
from autobalance.simulated.clock import DEFAULT_STREAM, Clock, StreamKey

_numbers = itertools.count(DEFAULT_STREAM + 1)


class Stream(torch.Stream):
    """Operations of one device that run one after the other, as `torch.cuda.Stream`.

    Example:
        >>> copies = torch.simulated.Stream("simulated:1")
        >>> with torch.simulated.stream(copies):
        ...     x = x.to("simulated:1")
        >>> torch.simulated.current_stream("simulated:1").wait_stream(copies)

    Args:
        device: index, name or torch.device; None for the current one.
        priority: has no effect.
    """

    @staticmethod
    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return _stream(backend.index_of(device), next(_numbers))

    @property
    def key(self) -> StreamKey:
        """By which the clock knows it."""
        return self.device_index, self.stream_id

    def synchronize(self) -> None:
        """Let the host wait for what was launched on it."""
        hands = clock.running()
        if hands is not None:
            hands.hold_host(hands.time_of(self.key))

    def query(self) -> bool:
        """Whether all that was launched on it is done."""
        hands = clock.running()
        return hands is None or hands.time_of(self.key) <= hands.host

    def wait_event(self, event: Any) -> None:
        """Begin what is launched from now on after an event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Begin what is launched from now on after what was launched on another stream."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Mark this point of the stream by an event.

        Args:
            event: to record; None for a new one.

        Returns:
            The event.
        """
        made = Event() if event is None else event
        made.record(self)
        return made


class Event:
    """A point in a stream, as `torch.cuda.Event`.

    Example:
        >>> done = torch.simulated.Event()
        >>> done.record()
        >>> torch.simulated.current_stream("simulated:1").wait_event(done)

    Args:
        enable_timing, blocking, interprocess: have no effect.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._clock: Clock | None = None
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of a stream; None for the current one."""
        self._clock = clock.running()
        if self._clock is not None:
            # A stream that is done waits for the host to launch the record itself.
            self._time = max(self._clock.host, self._clock.time_of((stream or current_stream()).key))

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, None for the current one, begin what is launched from now on after the event."""
        hands = clock.running()
        if hands is not None:
            hands.hold((stream or current_stream()).key, self._time_on(hands))

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        hands = clock.running()
        if hands is not None:
            hands.hold_host(self._time_on(hands))

    def query(self) -> bool:
        """Whether it has come to pass."""
        hands = clock.running()
        return hands is None or self._time_on(hands) <= hands.host

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another.

        Args:
            end_event: the later one.

        Raises:
            RuntimeError: one of them was not recorded while the clock ran, since it was reset last.
        """
        if self._clock is None or self._clock is not end_event._clock:
            raise RuntimeError(
                "the time between two events is known only if both were recorded after torch.simulated.reset_clock()"
            )
        return 1e3 * (end_event._time - self._time)

    def _time_on(self, hands: Clock) -> float:
        """What was recorded before the clock was started is past."""
        return self._time if self._clock is hands else 0.0


def current_stream(device: Any = None) -> Stream:
    """The stream of a device, None for the current one, on which this thread's operations run.

    Args:
        device: as torch gives them.
    """
    return _stream(*clock.current_stream(backend.index_of(device)))


def default_stream(device: Any = None) -> Stream:
    """The stream of a device, None for the current one, on which operations run unless another is set.

    Args:
        device: as torch gives them.
    """
    return _stream(backend.index_of(device), DEFAULT_STREAM)


def set_stream(stream: Stream | None) -> None:
    """Make a stream, and its device, the current one of this thread; None changes nothing.

    Args:
        stream: of a simulated device.
    """
    if stream is not None:
        backend.set_device(stream.device_index)
        clock.set_current_stream(stream.key)


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Inside, a stream and its device are the current ones of this thread; None changes nothing.

    Args:
        stream: of a simulated device.
    """
    if stream is None:
        yield
        return
    with backend.use_device(stream.device_index), clock.on_stream(stream.key):
        yield


def register() -> None:
    """Add streams and the clock to `torch.simulated`; once a process."""
    module: Any = torch.get_device_module(backend.NAME)
    for value in (Stream, Event, current_stream, default_stream, set_stream, clock.reset_clock, clock.elapsed):
        setattr(module, value.__name__, value)
    module.stream = use_stream  # as `torch.cuda.stream`


def _stream(index: int, number: int) -> Stream:
    made: Stream = compat.make_stream(Stream, index, number)
    return made
