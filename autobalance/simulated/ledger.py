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
    """Bytes that the allocator takes for a storage of `nbytes`."""
    return -(-nbytes // GRANULE) * GRANULE


class Ledger(Protocol):
    """What is told of every storage that is born or grows; may raise to refuse it. Frees are its own business."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        """Take note that `storage` now holds `nbytes` (not rounded), charged to `account`."""


class _Entry(weakref.ref[Any]):
    """A weak reference to a storage that knows what the storage was charged."""

    __slots__ = ("account", "held", "key")

    key: int
    account: int
    held: int


class DeviceLedger:
    """Live and peak bytes of each device, with a capacity past which an allocation fails.

    Example:
        >>> ledger = DeviceLedger()
        >>> ledger.capacities = {0: 96 * 2**20}
    """

    def __init__(self) -> None:
        self.capacities: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        self._entries: dict[int, _Entry] = {}
        # Re-entrant: a garbage collection inside `allocate` may free storages in the same thread.
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

    def capacity(self, account: int) -> int:
        """Bytes the device has; sys.maxsize where there is no limit."""
        return self.capacities.get(account, sys.maxsize)

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        """Count a storage at birth, or again when it has grown.

        Raises:
            torch.OutOfMemoryError: past the capacity; nothing is counted then.
        """
        wanted = rounded(nbytes)
        with self._lock:
            key = compat.storage_key(storage)
            entry = self._entries.get(key)
            if entry is not None:
                account = entry.account
            more = wanted - (entry.held if entry is not None else 0)
            live = self._live.get(account, 0) + more
            if more > 0 and live > self.capacity(account):
                raise self._out_of_memory(account, more)
            if entry is None:
                entry = _Entry(storage, self._free)
                entry.key, entry.account = key, account
                self._entries[key] = entry
            entry.held = wanted
            self._live[account] = live
            if live > self._peak.get(account, 0):
                self._peak[account] = live

    def _free(self, entry: _Entry) -> None:
        with self._lock:
            del self._entries[entry.key]
            self._live[entry.account] -= entry.held

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

_current: Ledger = devices


def current_ledger() -> Ledger:
    """The ledger that is told of births now."""
    return _current


def is_tracing() -> bool:
    """Whether a ledger other than the devices' own is told of births."""
    return _current is not devices


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
    __slots__ = ("key", "ledger", "nbytes")

    key: int
    nbytes: int
    ledger: Ledger


def note(storage: torch.UntypedStorage, account: int) -> None:
    """Tell the current ledger of `storage` if it is new, its own if it has grown.

    Raises:
        torch.OutOfMemoryError: the ledger refuses; the storage is not counted.
    """
    key = compat.storage_key(storage)
    birth = _born.get(key)
    nbytes = storage.nbytes()
    if birth is None:
        _current.allocate(storage, nbytes, account)
        birth = _Birth(storage, _forget)
        birth.key, birth.nbytes, birth.ledger = key, nbytes, _current
        _born[key] = birth
    elif birth.nbytes != nbytes:
        birth.ledger.allocate(storage, nbytes, account)
        birth.nbytes = nbytes


_born: dict[int, _Birth] = {}


def _forget(birth: _Birth) -> None:
    del _born[birth.key]


def adopt(storage: torch.UntypedStorage) -> None:
    """Take a storage as known without charging it to anybody."""
    key = compat.storage_key(storage)
    birth = _Birth(storage, _forget)
    birth.key, birth.nbytes, birth.ledger = key, storage.nbytes(), _current
    _born[key] = birth


def reserve(storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
    """Count a storage as grown to `nbytes` before it is.

    Raises:
        torch.OutOfMemoryError: the ledger refuses; nothing has changed then.
    """
    birth = _born.get(compat.storage_key(storage))
    if birth is not None and nbytes > birth.nbytes:
        birth.ledger.allocate(storage, nbytes, account)
        birth.nbytes = nbytes
