"""Whose kernels a trace stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autobalance.devices.table import GPUS, find_gpu

TargetKind = Literal["simulated", "cpu", "cuda", "hip"]

DEFAULT_GPU = "A100-80GB"
"""What "cuda" stands for on a machine without a GPU."""


@dataclass(frozen=True)
class Target:
    """Whose kernels a trace stands for.

    Example:
        >>> Target("cuda", "A100-80GB", (8, 0))

    Attributes:
        kind: "cuda" and "hip" for GPUs, "cpu", or "simulated" for devices that are not there.
        name: as the user said it, or as the driver calls the GPU.
        capability: CUDA's compute capability, which decides between kernels; (0, 0) where there is none.
    """

    kind: TargetKind
    name: str
    capability: tuple[int, int] = (0, 0)

    @property
    def granule(self) -> int:
        """Bytes to whose multiples the device's allocator rounds up."""
        return 1 if self.kind == "cpu" else 512

    @property
    def is_emulated(self) -> bool:
        """Whether the kernels are those of a GPU, which tables describe."""
        return self.kind in ("cuda", "hip")


SIMULATED = Target("simulated", "simulated")


def find_target(word: str, present: Target | None = None) -> Target:
    """The target that a word names.

    Example:
        >>> find_target("A100-80GB").capability
        (8, 0)

    Args:
        word: "cuda", "hip", "cpu", "simulated", or a GPU's name.
        present: the GPU that is there, for which "cuda" then stands.

    Raises:
        ValueError: for a word that names none.
    """
    if word == "simulated":
        return SIMULATED
    if word == "cpu":
        return Target("cpu", "cpu")
    if word == "hip":
        return present if present is not None and present.kind == "hip" else Target("hip", "hip", (9, 0))
    if word == "cuda" and present is not None:
        return present
    gpu = find_gpu(DEFAULT_GPU if word == "cuda" else word) if isinstance(word, str) else None
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise ValueError(
            f"target={word!r} names no kernels that autobalance knows; choose 'cuda', 'cpu', 'simulated', 'hip', or a "
            f"GPU among {known}."
        )
    return Target(gpu.platform, gpu.name, gpu.capability)
