"""What does not fit on a device is run with a part of the batch, and its figures are continued to the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autobalance.measuring.call import Call
from autobalance.measuring.courier import Courier, all_tensors
from autobalance.measuring.passes import Passes
from autobalance.placement.move import Mover

_FIGURES = (
    "forward_time",
    "backward_time",
    "inputs",
    "outputs",
    "saved",
    "kept",
    "output_gradients",
    "gradients",
    "weight_gradients",
    "forward_peak",
    "backward_peak",
)


def batch_size(call: Call) -> int:
    """Samples in a call: the first size of its first floating tensor, else of its first tensor; 1 without any.

    Args:
        call: as the step made it.
    """
    tensors = [tensor for tensor in all_tensors((call.args, call.kwargs)) if tensor.dim()]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return len((floating or tensors)[0]) if tensors else 1


def sliced(call: Call, start: int, stop: int) -> Call:
    """The call with samples `start` to `stop` only; tensors that do not have one row a sample stay whole.

    Args:
        call: of `batch_size(call)` samples.
        start: first sample.
        stop: one past the last.
    """
    size = batch_size(call)

    def part(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() and len(tensor) == size else tensor

    args, kwargs = Mover(Courier(part), "slice").move((call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def measured_or_extrapolated(
    call: Call, run: Callable[[Call], Passes], capacity: str
) -> tuple[Passes, int, tuple[str, ...]]:
    """Run a call; where it does not fit, run parts of it and continue their figures to the whole.

    The figures of a layer are affine in the number of samples: what its weights cost is the same for every batch.

    Example:
        >>> measured_or_extrapolated(call, lambda part: run_passes(module, part, meter), "cuda:0")  # doctest: +SKIP

    Args:
        call: as the step made it.
        run: runs a call; raises `torch.OutOfMemoryError` where it does not fit.
        capacity: the device, in words.

    Returns:
        The figures, the largest number of samples that were run at once, and notes on how the figures came to be.

    Raises:
        torch.OutOfMemoryError: a single sample does not fit.
    """
    size = count = batch_size(call)
    passes = _unless_out_of_memory(run, call)
    if passes is not None:
        return passes, size, ()
    while passes is None and count > 1:
        count //= 2
        passes = _unless_out_of_memory(run, sliced(call, 0, count))
    if passes is None:
        return run(sliced(call, 0, 1)), 1, ()  # raises the device's own words
    smaller = run(sliced(call, 0, count // 2)) if count > 1 else None
    if smaller is None:
        return (
            _continued(None, passes, 0, count, size),
            count,
            (f"{size} samples did not fit on {capacity}: figures are {size} times those of one sample",),
        )
    return (
        _continued(smaller, passes, count // 2, count, size),
        count,
        (
            f"{size} samples did not fit on {capacity}: figures are extrapolated from those of {count // 2} and "
            f"{count} samples",
        ),
    )


def _unless_out_of_memory(run: Callable[[Call], Passes], call: Call) -> Passes | None:
    try:
        return run(call)
    except torch.OutOfMemoryError:
        return None


def _continued(small: Passes | None, large: Passes, few: int, many: int, wanted: int) -> Passes:
    """Figures of `wanted` samples from those of `few` and `many`; proportional where there is nothing smaller."""

    def continued(name: str) -> Any:
        at_many = getattr(large, name)
        at_few = getattr(small, name) if small is not None else 0
        value = at_many + (at_many - at_few) * (wanted - many) / (many - few)
        return value if isinstance(at_many, float) else max(0, round(value))

    return replace(large, **{name: continued(name) for name in _FIGURES})


def forward_in_parts(call: Call, count: int, forward: Callable[[Call], Any]) -> Any:
    """What a call returns, put together from parts of at most `count` samples.

    Args:
        call: as the step made it.
        count: of samples that fit at once.
        forward: runs a part, returns what it returns on the host.
    """
    size = batch_size(call)
    if count >= size:
        return forward(call)
    bounds = [(start, min(size, start + count)) for start in range(0, size, count)]
    parts = [forward(sliced(call, start, stop)) for start, stop in bounds]
    columns = [all_tensors(part) for part in parts]
    rows = [stop - start for start, stop in bounds]
    whole = iter([_joined(pieces, rows) for pieces in zip(*columns, strict=True)])
    return Mover(Courier(lambda tensor: next(whole)), "whole").move(parts[0])


def _joined(pieces: tuple[Tensor, ...], rows: Sequence[int]) -> Tensor:
    """Pieces with a row for each sample one after the other; of what has none, the first."""
    has_rows = all(piece.dim() and len(piece) == count for piece, count in zip(pieces, rows, strict=True))
    return torch.cat(pieces) if has_rows else pieces[0]
