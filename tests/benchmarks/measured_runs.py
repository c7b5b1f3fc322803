"""What nvidia-smi showed of other people's training runs on an A100 with 40 GB, read from their csv files.

GPUMemNet (itu-rad/GPUMemNet, arXiv 2602.17817): the most that the process held within a minute of training.
"""

from __future__ import annotations

import csv
from ast import literal_eval
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

FULL_MIB = 39_000
"""From here on the GPU is full: the allocator gives cached memory back, and runs fail."""

SLOWEST = 0.6
"""How much less than at smaller batches a sample may add, for the sake of rounding."""


@dataclass(frozen=True)
class Mlp:
    """One multilayer perceptron and what its training held.

    Attributes:
        name: of the run, for tables.
        inputs: width of the input.
        layers: (kind, width) of every layer, as the file says them.
        dropout: probability of its dropout layers.
        batch_size: samples.
        mib: what was measured.
    """

    name: str
    inputs: int
    layers: tuple[tuple[str, int], ...]
    dropout: float
    batch_size: int
    mib: int


def read_mlps(path: Path) -> list[Mlp]:
    """The runs of `mlp_a100.csv`.

    Args:
        path: of the file.
    """
    with path.open(newline="") as file:
        return [
            Mlp(
                name=f"{row['arch']} {row['depth']} x {row['input']}, {row['activation']}",
                inputs=int(row["input"]),
                layers=tuple((kind, width) for kind, width, _ in literal_eval(row["layers"])),
                dropout=float(row["dropout"]),
                batch_size=int(row["batch_size"]),
                mib=int(row["measured_mib"]),
            )
            for row in csv.DictReader(file)
        ]


def read_timm(path: Path) -> dict[str, dict[int, int]]:
    """MiB by batch size, by the name of the model, of `timm_a100.csv`.

    Args:
        path: of the file.
    """
    runs: dict[str, dict[int, int]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            runs[row["model"]][int(row["batch_size"])] = int(row["measured_mib"])
    return dict(runs)


def went_through(measured: Mapping[int, int]) -> dict[int, int]:
    """The runs of one model that trained for a minute, by what was measured alone.

    A run that fails on the way shows what it held by then, and one that is caught while cuDNN tries kernels shows what
    those take. What a step holds is the highest of several straight lines in the batch, so it grows, and ever faster,
    but for what the allocator rounds up. So the fewest runs are left out with which that is so; of equally few those
    with large batches, which fail first. A single run cannot be told from a failed one.

    Args:
        measured: MiB by batch size.

    Returns:
        The same without the others; empty if fewer than two are left.
    """
    sizes = sorted(size for size, mib in measured.items() if mib < FULL_MIB)
    for count in range(len(sizes), 1, -1):
        for chosen in combinations(sizes, count):  # those with small batches come first
            found = {size: measured[size] for size in chosen}
            if _grows_ever_faster(list(found.items())):
                return found
    return {}


def _grows_ever_faster(points: Sequence[tuple[int, int]]) -> bool:
    slopes = [(other[1] - one[1]) / (other[0] - one[0]) for one, other in pairwise(points)]
    return all(slope > SLOWEST * max(0, *slopes[: index + 1]) for index, slope in enumerate(slopes))
