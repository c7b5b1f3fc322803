"""The devices that are there, if any, whose kernels a trace then stands for unless the user says otherwise."""

from __future__ import annotations

import torch

from autobalance.kernels.target import Target, find_target
from autobalance.simulated import backend


def present_gpu() -> Target | None:
    """The kernels of the first GPU that is there, None on a machine without one.

    Example:
        >>> find_target("cuda", present_gpu())
    """
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return Target("hip" if torch.version.hip else "cuda", name, torch.cuda.get_device_capability(0))


def target_of(word: str | None) -> Target:
    """The target that a word names; for None that of the devices of this process.

    Example:
        >>> target_of(None)

    Args:
        word: as `find_target` knows it. None: the GPU where there is one, else the simulated devices where some are
            configured, else the GPU that "cuda" stands for.

    Raises:
        ValueError: for a word that names none.
    """
    present = present_gpu()
    if word is None:
        word = "simulated" if present is None and backend.device_count() > 0 else "cuda"
    return find_target(word, present)
