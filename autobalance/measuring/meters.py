"""Memory and time of a device on which something really runs, asked in one way whatever the device is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from autobalance.compat import DispatchMode, storage_key
from autobalance.kernels.target import Target
from autobalance.placement.locate import with_index
from autobalance.profiling.operands import operands_in
from autobalance.profiling.tracer import Tracer
from autobalance.simulated import backend as simulated
from autobalance.simulated.configure import from_environment
from autobalance.simulated.ledger import GRANULE


class Meter(Protocol):
    """Counts the bytes of one device, and times work on it.

    Attributes:
        device: the device.
        granule: bytes to whose multiples its allocator rounds up.
    """

    device: torch.device
    granule: int

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which what is made is counted."""

    def allocated(self) -> int:
        """Bytes of live tensors."""

    def peak(self) -> int:
        """Most bytes that were live at once since `reset`."""

    def reset(self) -> None:
        """Start `peak` again from what is live now."""

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time that the device takes for `work`.

        Args:
            work: is run several times.
        """


def make_meter(device: torch.device | str) -> Meter:
    """The meter of a device.

    Example:
        >>> make_meter("cpu").device
        device(type='cpu')

    Args:
        device: a GPU, a simulated device or the CPU.

    Raises:
        ValueError: the device is not there, or of a type that has no memory counters.
    """
    if str(device).startswith(simulated.NAME) and not simulated.device_count():
        from_environment()
        if not simulated.device_count():
            raise ValueError(
                f"{device} is not there: no simulated devices are configured; call autobalance.simulate(1), or set "
                f"AUTOBALANCE_SIMULATE=1x16GiB"
            )
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return HostMeter()
    backend = getattr(torch, wanted.type, None)
    if not hasattr(backend, "max_memory_allocated"):
        raise ValueError(f"{wanted} has no memory counters; measure on 'cuda:0', a simulated device or 'cpu'")
    there = backend.device_count() if backend is not None and backend.is_available() else 0
    if (wanted.index or 0) >= there:
        raise ValueError(f"{wanted} is not there: this process sees {there} {wanted.type} device(s)")
    return BackendMeter(with_index(wanted))


@contextmanager
def meter_for(target: Target) -> Iterator[Meter]:
    """The meter of a device that stands for a target: the CPU for itself, a GPU if there is one, else a simulated one.

    Example:
        >>> with meter_for(find_target("cuda")) as meter: ...      # doctest: +SKIP

    Args:
        target: whose kernels a trace chooses.
    """
    if target.kind == "cpu":
        yield HostMeter()
    elif target.is_emulated and torch.cuda.is_available():
        yield make_meter("cuda:0")
    else:
        from autobalance.simulated.backend import NAME, device_count
        from autobalance.simulated.configure import simulate

        with simulate(max(1, device_count())):  # without a limit
            yield make_meter(f"{NAME}:0")


class BackendMeter:
    """CUDA or simulated devices: the backend's own counters.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.granule = GRANULE
        self._backend: Any = torch.get_device_module(device)
        if device.type == "cuda":
            torch.cuda.init()  # from here on its random state can be kept

    def watching(self) -> AbstractContextManager[Any]:
        """The backend counts always."""
        return nullcontext()

    def allocated(self) -> int:
        """Bytes of live tensors, as the allocator rounds them."""
        return int(self._backend.memory_allocated(self.device))

    def peak(self) -> int:
        """Most bytes that were live at once since `reset`."""
        return int(self._backend.max_memory_allocated(self.device))

    def reset(self) -> None:
        """Start `peak` again from what is live now."""
        self._backend.reset_peak_memory_stats(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time between two events around `work` on CUDA; elsewhere work is done when it returns."""
        if self.device.type != "cuda":
            return _seconds_of_host(work)
        stream = torch.cuda.current_stream(self.device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000  # from milliseconds


class HostMeter:
    """The CPU, which has no counters: storages that operations make are watched, not what kernels take inside."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.granule = 1
        self._tracer = Tracer(self.granule)
        self._watch = _New(self._tracer)
        self._start = 0

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which what is made is counted."""
        return self._watch

    def allocated(self) -> int:
        """Bytes of live storages that were made while watched."""
        return self._walk(len(self._tracer.events))[0]

    def peak(self) -> int:
        """Most bytes that were live at once since `reset`."""
        return self._walk(self._start)[1]

    def reset(self) -> None:
        """Start `peak` again from what is live now."""
        self._start = len(self._tracer.events)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time that `work` takes."""
        return _seconds_of_host(work)

    def _walk(self, start: int) -> tuple[int, int]:
        """Bytes that live now, and the most from event `start` on."""
        live = highest = 0
        for position, event in enumerate(self._tracer.events):
            if position == start:
                highest = live
            live += self._tracer.sizes[event - 1] if event > 0 else -self._tracer.sizes[-event - 1]
            highest = max(highest, live) if position >= start else live
        return live, highest


class _New(DispatchMode):
    """Tells a tracer of every storage that no operand has: what was there before is not counted."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = {storage_key(tensor.untyped_storage()) for tensor in operands_in((args, kwargs))}
        for made in operands_in([result]):
            storage = made.untyped_storage()
            if storage_key(storage) not in there or self._tracer.find(storage) is not None:
                self._tracer.allocate(storage, storage.nbytes(), 0)
        return result


def _seconds_of_host(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
