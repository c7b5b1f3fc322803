"""A test of the way between every two devices, before anything that matters goes along it.

Some drivers and boards corrupt copies between GPUs silently: no call fails, and a training just never learns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import permutations

import torch
from torch import Tensor

from autobalance.placement.couriers import carry
from autobalance.placement.host_path import distrust

_SIZES = (1, 3, 513, 4097)
_GPU_SIZES = (*_SIZES, 65_537, 2**20 - 3)
"""Bytes: odd ones, since a kernel may be right for whole words only; all from the allocator's pool of small blocks."""

_checked: set[tuple[torch.device, torch.device]] = set()


def check_pairs(devices: Iterable[torch.device]) -> None:
    """Send patterns between devices, both ways, and compare what arrives bit for bit; each pair once a process.

    A pair that corrupts what it is given goes through the host from then on, with a warning.

    Example:
        >>> check_pairs([torch.device("cuda", 0), torch.device("cuda", 1)])  # doctest: +SKIP

    Args:
        devices: between which tensors will go; may repeat.

    Raises:
        RuntimeError: what goes through the host arrives corrupted as well.
    """
    for pair in permutations(dict.fromkeys(devices), 2):
        if pair not in _checked and all(device.type != "cpu" for device in pair):
            _check(*pair)
            _checked.add(pair)


def _check(source: torch.device, target: torch.device) -> None:
    wrong = _corrupted(source, target)
    if wrong is None:
        return
    distrust(source, target)
    still_wrong = _corrupted(source, target)
    if still_wrong is not None:
        raise RuntimeError(
            f"Copies from {source} to {target} arrive corrupted, directly ({wrong}) and through the host's memory "
            f"({still_wrong}), so that nothing can be trained on these two. Check the machine's memory and the GPUs "
            f"(`nvidia-smi -q -d ECC`, `dmesg`), or leave one of them out: Trainer(devices=[...])."
        )
    warnings.warn(
        f"Copies from {source} to {target} arrive corrupted ({wrong}), although no call fails. From now on they go "
        f"through the host's pinned memory, which is right but slower. Mostly the cause is the machine's set-up: turn "
        f"off the IOMMU, or its translation (kernel option iommu=pt), and ACS on PCIe bridges "
        f"(`lspci -vvv | grep ACSCtl`), and update the driver; NVIDIA's simpleP2P sample shows the same fault.",
        stacklevel=3,
    )


def _corrupted(source: torch.device, target: torch.device) -> str | None:
    """What is wrong with copies from one device to another, in words; None if nothing is."""
    sizes = _GPU_SIZES if source.type == "cuda" else _SIZES
    with torch.inference_mode(False), torch.no_grad():
        for number, size in enumerate(sizes):
            pattern = _pattern(size, salt=number + 31 * (source.index or 0) + 7 * (target.index or 0))
            expected = pattern.to(target)
            arrived = carry(pattern.to(source), target)
            if not torch.equal(arrived, expected):
                return f"{int((arrived != expected).sum())} of {size} bytes are wrong"
    return None


def _pattern(size: int, salt: int) -> Tensor:
    """Bytes that no earlier test of the process has left where a copy is to be written."""
    positions = torch.arange(size, dtype=torch.int64)
    return ((positions * 167 + positions // 251 + 1 + 89 * salt) % 256).to(torch.uint8)
