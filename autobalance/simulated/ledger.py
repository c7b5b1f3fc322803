"""Who holds how many bytes: live storages per account, counted as the CUDA caching allocator rounds them."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from autobalance import compat
from autobalance.units import format_size

GRANULE = 512
"""Bytes to whose multiples CUDA's allocator rounds up (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""


def rounded(nbytes: int) -> int:
    """Bytes that the allocator takes for a storage of `nbytes`.

    Args:
        nbytes: of the storage.
    """
    return -(-nbytes // GRANULE) * GRANULE


class Ledger(Protocol):
    """What is told of every storage that is born or grows; may raise to refuse it. Frees are its own business."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        """Take note that `storage` now holds `nbytes` (not rounded), charged to `account`.

        Args:
            storage: of elements.
            nbytes: of it, now.
            account: who pays.
        """


class DeviceLedger:
    """Live and peak bytes of each device, with a capacity past which a charge fails.

    Example:
        >>> ledger = DeviceLedger()
        >>> ledger.capacities = {0: 96 * 2**20}
        >>> ledger.charge(0, 512)

    Attributes:
        capacities: bytes of each device; those that are missing have no limit.
    """

    def __init__(self) -> None:
        self.capacities: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        # Re-entrant: a garbage collection inside `charge` may free storages in the same thread.
        self._lock = threading.RLock()

    def allocated(self, account: int) -> int:
        """Bytes live now."""
        return self._live.get(account, 0)

    def peak(self, account: int) -> int:
        """Most bytes live at once since `reset_peak`."""
        return self._peak.get(account, 0)

    def reset_peak(self, account: int) -> None:
        """Forget the past: the peak is what is live now."""
        self._peak[account] = self._live.get(account, 0)

    def configure(self, capacities: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """Start anew with these capacities and with peaks at what is live now.

        Args:
            capacities: bytes by index of the device; others have no limit.

        Returns:
            The capacities and peaks until now, for `restore`.
        """
        before = self.capacities, self._peak
        self.capacities, self._peak = capacities, dict(self._live)
        return before

    def restore(self, before: tuple[dict[int, int], dict[int, int]]) -> None:
        """Bring back what `configure` returned, as if nothing had happened in between."""
        self.capacities, peaks = before
        self._peak = {account: max(live, peaks.get(account, 0)) for account, live in self._live.items()}

    def capacity(self, account: int) -> int:
        """Bytes the device has; sys.maxsize where there is no limit."""
        return self.capacities.get(account, sys.maxsize)

    def charge(self, account: int, nbytes: int) -> None:
        """Count `nbytes` more on a device; a negative number frees them.

        Args:
            account: index of the device.
            nbytes: rounded up already.

        Raises:
            torch.OutOfMemoryError: past the capacity; nothing is counted then.
        """
        with self._lock:
            live = self._live.get(account, 0) + nbytes
            if nbytes > 0 and live > self.capacities.get(account, sys.maxsize):
                raise self._out_of_memory(account, nbytes)
            self._live[account] = live
            if live > self._peak.get(account, 0):
                self._peak[account] = live

    def _out_of_memory(self, account: int, wanted: int) -> torch.OutOfMemoryError:
        capacity, live = self.capacity(account), self.allocated(account)
        # Lightning and others recognise CUDA's error by the words "CUDA" and "out of memory".
        return torch.OutOfMemoryError(
            f"simulated:{account} out of memory, as a CUDA device would be. "
            f"Tried to allocate {format_size(wanted)}. Simulated device {account} has a total capacity of "
            f"{format_size(capacity)} of which {format_size(capacity - live)} is free; {format_size(live)} is in use. "
            "Give the devices more memory in autobalance.simulate(...), use a smaller batch, or more devices."
        )


devices = DeviceLedger()
"""Counts what no other ledger asked for."""

_current: Ledger | None = None


def is_tracing() -> bool:
    """Whether a ledger other than the devices' own is told of births."""
    return _current is not None


@contextlib.contextmanager
def using_ledger(ledger: Ledger) -> Iterator[None]:
    """Tell `ledger`, instead of the devices' own, of the storages that are born or grow inside.

    Example:
        >>> with using_ledger(my_ledger):
        ...     loss = model(batch)

    Args:
        ledger: any object with `allocate(storage, nbytes, account)`; it may raise to refuse the storage.
    """
    global _current
    before, _current = _current, ledger
    try:
        yield
    finally:
        _current = before


class _Birth(weakref.ref[Any]):
    """A weak reference to a storage that knows to whom it was charged; `ledger` is None for the devices' own."""

    __slots__ = ("account", "key", "ledger", "nbytes")

    key: int
    nbytes: int
    account: int
    ledger: Ledger | None


_born: dict[int, _Birth] = {}


def note(storage: torch.UntypedStorage, account: int) -> None:
    """Tell the current ledger of `storage` if it is new; if its size has changed, the ledger that was told of it.

    Args:
        storage: of elements.
        account: who pays.

    Raises:
        torch.OutOfMemoryError: the ledger refuses; the storage is not counted.
    """
    birth = _born.get(compat.storage_key(storage))
    nbytes = storage.nbytes()
    if birth is None:
        if _current is None:
            devices.charge(account, rounded(nbytes))
        else:
            _current.allocate(storage, nbytes, account)
        _bear(storage, nbytes, account, _current)
    elif birth.nbytes != nbytes:
        _grow(birth, storage, nbytes)


def reserve(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Count a storage as grown to `nbytes` before it is.

    Args:
        storage: of elements.
        nbytes: that it is to have.

    Raises:
        torch.OutOfMemoryError: the ledger refuses; nothing has changed then.
    """
    birth = _born.get(compat.storage_key(storage))
    if birth is not None and nbytes > birth.nbytes:
        _grow(birth, storage, nbytes)


def adopt(storage: torch.UntypedStorage) -> None:
    """Take a storage as known without charging it to anybody.

    Args:
        storage: of elements.
    """
    _bear(storage, storage.nbytes(), _NOBODY, _nobody)


def _grow(birth: _Birth, storage: torch.UntypedStorage, nbytes: int) -> None:
    if birth.ledger is None:
        devices.charge(birth.account, rounded(nbytes) - rounded(birth.nbytes))
    else:
        birth.ledger.allocate(storage, nbytes, birth.account)
    birth.nbytes = nbytes


def _bear(storage: torch.UntypedStorage, nbytes: int, account: int, ledger: Ledger | None) -> None:
    birth = _Birth(storage, _bury)
    birth.key = compat.storage_key(storage)
    birth.nbytes, birth.account, birth.ledger = nbytes, account, ledger
    _born[birth.key] = birth


def _bury(birth: _Birth) -> None:
    del _born[birth.key]
    if birth.ledger is None:
        devices.charge(birth.account, -rounded(birth.nbytes))


class _Nobody:
    """The ledger of storages that are not counted."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        """Count nothing."""


_NOBODY = -1
_nobody = _Nobody()
