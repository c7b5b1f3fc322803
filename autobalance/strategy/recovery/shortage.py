"""What an out-of-memory error tells: where, how much was asked for, and how much was in use."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import torch

from autobalance.units import format_size, parse_size

_INDEX = re.compile(r"(?:simulated:|cuda:|GPU )(\d+)")
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.,]+ ?[KMGT]?i?B|\d+ bytes)")
# Libraries that allocate for themselves report a lack of memory in words of their own.
_OTHER_WORDS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Shortage:
    """One failed allocation.

    Attributes:
        text: first line of the error.
        device: position of the device among the Trainer's; None where the error does not say it.
        wanted: bytes that were asked for; 0 where the error does not say it.
        in_use: bytes that this process held on the device when it failed.
    """

    text: str
    device: int | None
    wanted: int
    in_use: int

    @classmethod
    def of(cls, error: BaseException, devices: Sequence[torch.device]) -> Shortage:
        """Read an error while what the step holds is still alive.

        Example:
            >>> Shortage.of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB. GPU 0 ..."), devices)

        Args:
            error: an out-of-memory error.
            devices: the Trainer's devices.
        """
        text = str(error).strip()
        index, wanted = _INDEX.search(text), _WANTED.search(text)
        known = {device.index: position for position, device in enumerate(devices)}
        device = known.get(int(index.group(1))) if index else None
        in_use = memory_allocated(devices[device]) if device is not None else 0
        return cls(text.split("\n")[0], device, _bytes_in(wanted.group(1)) if wanted else 0, in_use)

    @property
    def need(self) -> int:
        """Bytes that would have been in use, had there been enough."""
        return self.in_use + self.wanted

    def told(self, devices: Sequence[torch.device]) -> str:
        """In words.

        Args:
            devices: the Trainer's devices.
        """
        if self.device is None:
            return self.text
        return (
            f"{devices[self.device]} held {format_size(self.in_use)} and was asked for {format_size(self.wanted)} more"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory, in the words of torch or of the libraries under it.

    Args:
        error: what a step has raised.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS)


def let_go(error: BaseException) -> None:
    """Free what the frames of a failed call hold: the traceback stays, their local variables do not.

    Args:
        error: what was raised; errors that led to it are let go, too.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            for frame, _ in traceback.walk_tb(each.__traceback__):
                _clear(frame)
            pending += [each.__cause__, each.__context__]


def _clear(frame: FrameType | None) -> None:
    """Clear a frame and its callers until one that still runs; not all callers are in a traceback."""
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:  # it runs
            return
        frame = frame.f_back


def free_memory(devices: Sequence[torch.device]) -> None:
    """Collect what only circles of references hold, and have the devices' allocators give back what they cache.

    Args:
        devices: of the run.
    """
    gc.collect()
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()


def memory_allocated(device: torch.device) -> int:
    """Bytes that this process holds on a device; 0 for the host, where nobody counts them.

    Args:
        device: any.
    """
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).memory_allocated(device))


def _bytes_in(words: str) -> int:
    return int(words.split()[0]) if words.endswith("bytes") else int(parse_size(words.replace(",", "")))
