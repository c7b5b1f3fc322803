"""The devices that are there, if any, whose kernels a trace then stands for unless the user says otherwise."""

from __future__ import annotations

import re

import torch

from autobalance.kernels.target import Target, find_target
from autobalance.simulated import backend


def present_gpu(index: int = 0) -> Target | None:
    """The kernels of a GPU that is there, None where it is not.

    Example:
        >>> find_target("cuda", present_gpu())

    Args:
        index: as CUDA numbers it.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    name = torch.cuda.get_device_name(index)
    return Target("hip" if torch.version.hip else "cuda", name, torch.cuda.get_device_capability(index))


def target_of(word: str | None) -> Target:
    """The target that a word names; for None that of the devices of this process.

    Example:
        >>> target_of(None)

    Args:
        word: as `find_target` knows it, or "cuda:1" for that GPU. None: the GPU where there is one, else the simulated
            devices where some are configured, else the GPU that "cuda" stands for.

    Raises:
        ValueError: for a word that names none.
    """
    index = re.fullmatch(r"cuda:(\d+)", word) if isinstance(word, str) else None
    present = present_gpu(int(index[1]) if index else 0)
    if index:
        if present is None:
            raise ValueError(
                f"target={word!r} is no GPU of this machine; name a kind of GPU instead, such as 'A100-80GB'."
            )
        return present
    if word is None:
        word = "simulated" if present is None and backend.device_count() > 0 else "cuda"
    return find_target(word, present)
