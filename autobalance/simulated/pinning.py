"""Pinned host memory, which simulated devices do not have: `pin_memory()` gives back the tensor it was given."""

from __future__ import annotations

import logging
from typing import Any

import torch

from autobalance.simulated import pinned
from autobalance.simulated.dispatch import carry_out
from autobalance.simulated.tensor import SimulatedTensor

_log = logging.getLogger("autobalance")
_libraries: list[torch.library.Library] = []
_said = False


def register() -> None:
    """Take over pinning, which torch hands to the accelerator; once a process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_pin_memory", _leave_as_it_is, "CPU")
    carry_out(torch.ops.aten._pin_memory.default, _pin)
    _libraries.append(library)  # a library unregisters its kernels when it dies


def forget_that_it_was_said() -> None:
    """Let the next pinning be mentioned again."""
    global _said
    _said = False


def _leave_as_it_is(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    global _said
    if not _said:
        _said = True
        _log.info("Host memory is not pinned while devices are simulated: pinned memory is for faster copies to a GPU.")
    pinned.mark(tensor)
    return tensor


def _pin(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    if isinstance(args[0], SimulatedTensor) and args[0].index is None:
        return _leave_as_it_is(args[0])
    raise RuntimeError(
        f"cannot pin a tensor on {args[0].device}: only dense tensors in host memory can be pinned. Call "
        f"`pin_memory()` before the tensor is moved there."
    )
