"""The device type "simulated" in torch: its registration, and the module `torch.simulated`.

As in `torch.cuda`, a device (`where`) is an index, "simulated:1", a `torch.device`, or None for the current one.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import clock, ledger, pending

NAME = "simulated"
MAX_DEVICES = 127
"""torch keeps a device's index in a signed byte."""

_FREE_NAME = "privateuseone"
_devices: dict[int | None, torch.device] = {}
_count = 0
_current = 0


def is_registered() -> bool:
    """Whether torch knows the device type in this process."""
    return bool(_devices)


def dispatch_keys() -> tuple[str, str]:
    """Dispatch keys, as torch.library names them, of the device type and of its autocast."""
    return compat.PRIVATE_BACKEND_KEYS


def register() -> None:
    """Make the device type known to torch, once and for the rest of the process.

    Raises:
        RuntimeError: CUDA is in use, or another backend has taken torch's one free device type.
    """
    if is_registered():
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "simulated devices cannot be added once CUDA is in use in this process; call autobalance.simulate(...) "
            "before anything touches a GPU, or start with CUDA_VISIBLE_DEVICES= (empty)"
        )
    taken = compat.private_backend_name()
    if taken != _FREE_NAME:
        raise RuntimeError(
            f"torch has room for one extra device type per process, and the backend {taken!r} has taken it; "
            "simulate devices in a process that does not import that backend"
        )
    compat.register_python_backend(NAME, _module(), pending.set_aside)
    _devices[None] = torch.device("cpu")
    _devices.update({index: torch.device(NAME, index) for index in range(MAX_DEVICES)})


def device(index: int | None) -> torch.device:
    """The torch device of a simulated index; the CPU for None.

    Args:
        index: of a simulated device.

    Raises:
        RuntimeError: no such device is configured.
    """
    if index is not None and not 0 <= index < _count:
        raise RuntimeError(
            f"invalid device ordinal: there is no {NAME}:{index}, {_count} simulated device(s) are configured; "
            f'call autobalance.simulate("{index + 1}x1GiB") or set AUTOBALANCE_SIMULATE'
        )
    return _devices[index]


def set_count(count: int) -> None:
    """Say how many devices there are from now on.

    Args:
        count: of devices.
    """
    global _count, _current
    _count = count
    if _current >= max(count, 1):
        _current = 0


def index_of(where: Any = None) -> int:
    """Index of a device given as torch gives them.

    Args:
        where: the device.

    Raises:
        ValueError: it is a device of another type.
        RuntimeError: no such device is configured.
    """
    if where is None:
        index = _current
    elif isinstance(where, int):
        index = where if where >= 0 else _current
    else:
        given = torch.device(where)
        if given.type != NAME:
            raise ValueError(f"expected a simulated device, got {given}")
        index = _current if given.index is None else given.index
    device(index)
    return index


def device_count() -> int:
    """Number of simulated devices that are configured."""
    return _count


def is_available() -> bool:
    """Whether any simulated device is configured."""
    return _count > 0


def is_initialized() -> bool:
    """Always true: there is nothing to start."""
    return True


def current_device() -> int:
    """Index of the device that `device="simulated"` means."""
    return _current


def set_device(where: Any) -> None:
    """Make a device the current one: the one that `device="simulated"` means where a tensor is made.

    `tensor.to("simulated")` without an index goes to device 0 always: torch asks a guard that cannot be told.
    """
    global _current
    _current = index_of(where)


@contextlib.contextmanager
def use_device(where: Any) -> Iterator[None]:
    """Make a device the current one inside; None or a negative index changes nothing."""
    global _current
    before, _current = _current, index_of(where)
    try:
        yield
    finally:
        _current = before


def synchronize(where: Any = None) -> None:
    """Let the clock's host wait for a device; in truth every operation is done when it returns."""
    index = index_of(where)
    hands = clock.running()
    if hands is not None:
        hands.hold_host_for(index)


def empty_cache() -> None:
    """Nothing to give back: memory is counted, not cached."""


def memory_allocated(where: Any = None) -> int:
    """Bytes of live storages on a device, each rounded up to 512 as CUDA's allocator does."""
    return ledger.devices.allocated(index_of(where))


def max_memory_allocated(where: Any = None) -> int:
    """Most bytes that were live at once on a device since `reset_peak_memory_stats`."""
    return ledger.devices.peak(index_of(where))


def reset_peak_memory_stats(where: Any = None) -> None:
    """Start `max_memory_allocated` again from what is live now."""
    ledger.devices.reset_peak(index_of(where))


def mem_get_info(where: Any = None) -> tuple[int, int]:
    """Free and total bytes of a device; the total is sys.maxsize where no limit was given."""
    index = index_of(where)
    total = ledger.devices.capacity(index)
    return total - ledger.devices.allocated(index), total


def get_device_name(where: Any = None) -> str:
    """The device in words."""
    return f"simulated device {index_of(where)}"


def get_device_properties(where: Any = None) -> types.SimpleNamespace:
    """Name, index and total memory (bytes) of a device."""
    index = index_of(where)
    return types.SimpleNamespace(name=get_device_name(index), index=index, total_memory=mem_get_info(index)[1])


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that autocast may cast to."""
    return [torch.float16, torch.bfloat16]


# One generator for all: a random number drawn on any simulated device is the one the CPU would have drawn, so that a
# split model sees the unsplit model's numbers.


def get_rng_state(where: Any = NAME) -> torch.Tensor:
    """State of the random generator, which simulated devices share with the CPU."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, where: Any = NAME) -> None:
    """Set the state of the random generator, which simulated devices share with the CPU.

    Args:
        state: what `get_rng_state` returned.
        where: any of them.
    """
    torch.set_rng_state(state.cpu())


def manual_seed(seed: int) -> None:
    """Seed the random generator, which simulated devices share with the CPU.

    Args:
        seed: of the generator.
    """
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """As `manual_seed`; torch.manual_seed calls it and then seeds the CPU's generator itself."""


def _is_in_bad_fork() -> bool:
    return False


_MODULE_NAMES = (
    "_is_in_bad_fork",
    "current_device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "synchronize",
)


def _module() -> types.ModuleType:
    """What becomes `torch.simulated`."""
    module = types.ModuleType(f"torch.{NAME}", "Devices that are not there, as torch.cuda is for those that are.")
    here = sys.modules[__name__]
    for name in _MODULE_NAMES:
        setattr(module, name, getattr(here, name))
    module.device = use_device  # type: ignore[attr-defined] # `torch.cuda.device`, and `device` above is another thing
    return module
