"""`torch.load(..., map_location="simulated:1")`: storages that say which device they are meant for."""

from __future__ import annotations

from typing import Any

import torch

from autobalance.simulated import backend


class DeviceStorage(torch.UntypedStorage):
    """A storage on the CPU that names a simulated device as its own, so that torch.load makes its tensors there."""

    simulated_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override] # read-only in torch, too; its stubs say otherwise
        """The simulated device."""
        return self.simulated_device

    def cpu(self) -> Any:
        """A plain storage with the same bytes."""
        return torch.UntypedStorage(self.nbytes()).copy_(self)


def register() -> None:
    """Tell torch.load of simulated devices; once a process."""
    torch.serialization.register_package(0, _tag, _restore)


def _tag(storage: Any) -> str | None:
    # What is saved is plain: it loads without simulated devices.
    return "cpu" if isinstance(storage, DeviceStorage) else None


def _restore(storage: Any, location: str) -> Any:
    if location.split(":")[0] != backend.NAME:
        return None
    index = backend.index_of(location)
    storage.__class__ = DeviceStorage
    storage.simulated_device = backend.device(index)
    return storage
