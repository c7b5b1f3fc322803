"""What a metric is given for a whole batch, from what it was given for the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autobalance.execution.batches.merge_rules import guess
from autobalance.execution.batches.merging import merge


def arguments_of_whole(
    pieces: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], sizes: Sequence[int], weights: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What a metric would have been given for the whole batch; of tensors the first dimension is that of samples.

    It is longer where a step flattens it, and shorter where it leaves samples out. What is longer or shorter and still
    the same in all parts is not of samples at all, such as weights of classes.

    Example:
        >>> arguments_of_whole([((torch.tensor([1]),), {}), ((torch.tensor([2, 3]),), {})], [1, 2], [0.3, 0.7])
        ([tensor([1, 2, 3])], {})

    Args:
        pieces: positional and named arguments, by part.
        sizes: samples of each part.
        weights: by which means are weighted, adding up to 1.
    """
    by_place: dict[Any, list[Any]] = {}
    for args, kwargs in pieces:
        for place, value in (*enumerate(args), *kwargs.items()):
            by_place.setdefault(place, []).append(value)
    varying = {tuple(sizes)}
    for values in by_place.values():
        lengths = _lengths(values)
        # Whether numbers are equal only the device tells: it is asked where lengths do not say enough.
        if lengths is not None and lengths not in varying and not _are_equal(values):
            varying.add(lengths)
    merged = {
        place: torch.cat(values) if _lengths(values) in varying else merge(values, sizes, guess(values, sizes), weights)
        for place, values in by_place.items()
    }
    positions = [place for place in merged if isinstance(place, int)]
    return [merged[place] for place in positions], {place: merged[place] for place in merged if place not in positions}


def _lengths(values: Sequence[Any]) -> tuple[int, ...] | None:
    """Lengths of tensors that can be put together along their first dimension; None: they cannot."""
    if not all(isinstance(value, Tensor) and value.dim() for value in values):
        return None
    return tuple(map(len, values)) if len({value.shape[1:] for value in values}) == 1 else None


def _are_equal(values: Sequence[Tensor]) -> bool:
    return len(set(map(len, values))) == 1 and all(torch.equal(value, values[0]) for value in values[1:])
