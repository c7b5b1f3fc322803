"""Gradients in a few numbers each, so that those of a batch and of its parts can be compared without keeping either.

A sketch holds products with random vectors of 1 and -1. It is linear: sketches of parts add up to the sketch of the
sum. Its mean square estimates the squared length of what it is of (Achlioptas, "Database-friendly random projections",
2003), so the sketch of a difference tells how large the difference is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

PRODUCTS = 16
_ROW = 4096
_ROWS_AT_ONCE = 256  # of a million elements together: 8 MiB in double precision

_LARGE = 4 * _ROW * _ROWS_AT_ONCE
"""Elements from which on a gradient is larger than the working space."""

Sketch = Tensor
"""`PRODUCTS` numbers on the host."""


@contextmanager
def sketching(module: nn.Module) -> Iterator[dict[str, Sketch]]:
    """Take each gradient that a backward inside adds to a parameter, and keep only its sketch.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> with sketching(layer) as sketches:
        ...     layer(torch.ones(1, 2)).backward()
        >>> list(sketches), layer.weight.grad
        (['weight'], None)

    Args:
        module: whose parameters; `.grad` of each should be None.

    Returns:
        The sketches by name of the parameter; complete when the context is left.
    """
    sums: dict[str, Tensor] = {}
    sketches: dict[str, Sketch] = {}

    def take(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            made = sketch_of(parameter.grad)
            parameter.grad = None
            sums[name] = sums[name] + made if name in sums else made

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: take(name, parameter))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    _ = _signs()  # not in a backward, where random operations may be others
    try:
        yield sketches
    finally:
        for handle in handles:
            handle.remove()
        sketches.update({name: made.cpu() for name, made in sums.items()})


@torch.no_grad()
def sketch_of(gradient: Tensor) -> Tensor:
    """The sketch of one gradient; of a small one on the host, where working space takes nothing from devices.

    Args:
        gradient: of any shape and type, dense or sparse.
    """
    flat = (gradient.to_dense() if gradient.layout != torch.strided else gradient).reshape(-1)
    if flat.numel() < _LARGE:
        flat = flat.cpu()
    signs = _signs().to(flat.device)
    total = torch.zeros(PRODUCTS, dtype=torch.float64, device=flat.device)
    whole = flat.numel() // _ROW
    for first in range(0, whole, _ROWS_AT_ONCE):
        last = min(whole, first + _ROWS_AT_ONCE)
        rows = flat[first * _ROW : last * _ROW].view(last - first, _ROW).double() @ signs
        total += (rows * _signs_of_rows(first, last).to(flat.device)).sum(0)
    rest = flat[whole * _ROW :]
    if rest.numel():
        total += (rest.double() @ signs[: rest.numel()]) * _signs_of_rows(whole, whole + 1)[0].to(flat.device)
    return total


def weighted(parts: Sequence[Mapping[str, Sketch]], weights: Sequence[float]) -> dict[str, Sketch]:
    """The sketches of a weighted sum; a parameter that a part does not train adds nothing.

    Args:
        parts: sketches of each part by parameter.
        weights: of each.
    """
    names = {name: None for part in parts for name in part}
    return {
        name: sum(
            (weight * part[name] for part, weight in zip(parts, weights, strict=True) if weight and name in part),
            torch.zeros(PRODUCTS, dtype=torch.float64),
        )
        for name in names
    }


def length(sketch: Sketch) -> float:
    """About the Euclidean length of what a sketch is of.

    Args:
        sketch: of a gradient, or a difference of two.
    """
    return float(sketch.square().mean().sqrt())


@cache
def _signs() -> Tensor:
    """1 and -1 by turns that are always the same: drawn by NumPy, since torch's random numbers may be held constant."""
    drawn = np.random.default_rng(0).integers(0, 2, (_ROW, PRODUCTS))
    return torch.from_numpy(2.0 * drawn - 1.0)


def _signs_of_rows(first: int, last: int) -> Tensor:
    """One more sign for each row and product, for all rows have the same signs for their elements: bits of a hash."""
    rows = np.arange(first, last, dtype=np.uint64)[:, None]
    mixed = rows * np.uint64(PRODUCTS) + np.arange(1, PRODUCTS + 1, dtype=np.uint64)
    for shift, factor in _MIXING:  # SplitMix64 (Steele, Lea and Flood, 2014)
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(1.0 - 2.0 * ((mixed >> np.uint64(40)) & np.uint64(1)).astype(np.float64))


_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
