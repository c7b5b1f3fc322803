"""The GPU that is there, if any."""

from __future__ import annotations

import torch

from autobalance.kernels.target import Target


def present_gpu() -> Target | None:
    """The kernels of the first GPU that is there, None on a machine without one.

    Example:
        >>> find_target("cuda", present_gpu())
    """
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return Target("hip" if torch.version.hip else "cuda", name, torch.cuda.get_device_capability(0))
