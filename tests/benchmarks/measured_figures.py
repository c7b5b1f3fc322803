"""How far predictions are from what was measured: errors, and their quartiles."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MIB = 2**20
PAGE = 2.0
"""MiB: nothing smaller is taken from a GPU, and the smallest models are hardly larger than the constant."""


@dataclass(frozen=True)
class Compared:
    """One run.

    Attributes:
        model: its name.
        group: the family it belongs to.
        is_transformer: whether it counts among the transformers.
        batch_size: samples.
        mib: what was measured.
        reserved: MiB that the allocator was predicted to reserve.
    """

    model: str
    group: str
    is_transformer: bool
    batch_size: int
    mib: float
    reserved: float


def constant(runs: Iterable[Compared]) -> float:
    """MiB that a process takes beside the allocator: CUDA's context, libraries and start-up, one for all runs.

    Taken from the smallest batch of each model, where there is least else to be wrong about.
    """
    smallest: dict[str, Compared] = {}
    for run in runs:
        known = smallest.get(run.model)
        if known is None or run.batch_size < known.batch_size:
            smallest[run.model] = run
    return statistics.median(run.mib - run.reserved for run in smallest.values())


def errors(runs: Iterable[Compared], constant: float, above: bool = True) -> list[float]:
    """Signed relative error of each run: of the part above the constant, or of all that was measured."""
    of = {run: max(run.mib - constant * above, PAGE) for run in runs}
    return [(run.reserved + constant - run.mib) / part for run, part in of.items()]


def errors_of_differences(runs: Iterable[Compared]) -> list[float]:
    """Signed relative errors of what a larger batch takes more than the next smaller one of the same model."""
    of_model: dict[str, list[Compared]] = {}
    for run in runs:
        of_model.setdefault(run.model, []).append(run)
    found = []
    for group in of_model.values():
        group.sort(key=lambda run: run.batch_size)
        for one, other in itertools.pairwise(group):
            measured = other.mib - one.mib
            found.append((other.reserved - one.reserved - measured) / measured)
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Of the sizes of errors, whatever their sign.

    Args:
        values: at least one.
    """
    sizes = [abs(value) for value in values]
    if len(sizes) < 2:
        return sizes[0], sizes[0], sizes[0]
    first, second, third = statistics.quantiles(sizes, n=4, method="inclusive")
    return first, second, third


def by_group(runs: Iterable[Compared]) -> Mapping[str, list[Compared]]:
    """The runs of each group, in the order of names."""
    groups: dict[str, list[Compared]] = {}
    for run in sorted(runs, key=lambda run: run.group):
        groups.setdefault(run.group, []).append(run)
    return groups
