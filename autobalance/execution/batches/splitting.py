"""Parts of a batch, as micro-batches take them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobalance.execution.batches.by_hook import parts_by_hook, sizes_of
from autobalance.execution.batches.packed import sequences_between
from autobalance.execution.batches.sample_layout import (
    Layout,
    UnsplittableBatchError,
    layout_of,
    leaves_in,
    samples_of,
)
from autobalance.placement.host_locator import HostLocator
from autobalance.placement.locate import Place
from autobalance.placement.move import Mover


@dataclass(frozen=True)
class Parts:
    """A batch in parts.

    Attributes:
        batches: the parts, in the order of their samples.
        sizes: samples of each.
        weights: by which the loss of each counts; they add up to 1.
        is_by_hook: whether the user's `split_batch` has made them.
    """

    batches: Sequence[Any]
    sizes: Sequence[int]
    weights: Sequence[float | Tensor]
    is_by_hook: bool = False


def split(batch: Any, count: int, batch_size: int | None = None, layout: Layout | None = None) -> list[Any]:
    """The batch in `count` parts along the dimension of its samples: views of it wherever torch can give one.

    Numbers, and tensors without that dimension, are shared. A tensor that occurs twice is one object in each part, too.

    Example:
        >>> split((torch.arange(5), "train"), 2)
        [(tensor([0, 1, 2]), 'train'), (tensor([3, 4]), 'train')]

    Args:
        batch: tensors, arrays, packed sequences, lists, and objects that hold them, in any nesting; not changed.
        count: how many parts; there are fewer if the batch has fewer samples.
        batch_size: how many samples there are, if the tensors' first dimensions do not tell.
        layout: where the samples are, by `layout_of` a batch of this kind; found if it is not given.

    Raises:
        UnsplittableBatchError: how many samples there are, or where, is not known.
    """
    layout = layout_of(batch, batch_size) if layout is None else layout
    leaves = [(leaf.value, layout[leaf.name]) for leaf in leaves_in(batch, layout)]
    sizes = part_sizes(samples_of(batch, layout), count)
    if len(sizes) == 1:
        return [batch]
    stops = list(accumulate(sizes))
    ranges = zip([0, *stops], stops, strict=False)
    return [_Cutter(leaves, start, stop).move(batch) for start, stop in ranges]


def samples_between(batch: Any, start: int, stop: int, layout: Layout) -> Any:
    """Some of the samples of a batch, in their order.

    Example:
        >>> samples_between(torch.arange(5), 1, 3, {"batch": 0})
        tensor([1, 2])

    Args:
        batch: as for `split`.
        start, stop: from and up to which sample.
        layout: where the samples are.
    """
    leaves = [(leaf.value, layout[leaf.name]) for leaf in leaves_in(batch, layout)]
    return _Cutter(leaves, start, stop).move(batch)


def part_sizes(samples: int, count: int) -> list[int]:
    """Sizes of the parts: they differ by at most one, larger ones first.

    Example:
        >>> part_sizes(7, 3)
        [3, 2, 2]

    Args:
        samples: of the whole batch.
        count: how many parts; fewer if there are fewer samples.
    """
    count = max(1, min(count, samples))
    return [samples // count + (index < samples % count) for index in range(count)]


def parts_of(
    module: Any,
    batch: Any,
    count: int,
    batch_size: int | None = None,
    layout: Layout | None = None,
    fewest: int = 1,
) -> Parts:
    """The batch in parts as the user's hooks say, or along its samples.

    Example:
        >>> parts_of(module, batch, 4).sizes
        [2, 2, 2, 1]

    Args:
        module: whose `split_batch` and `loss_weight` count, if it has them.
        batch: what a step is given.
        count: how many parts.
        batch_size: how many samples there are, if the tensors' first dimensions do not tell.
        layout: where the samples are.
        fewest: samples that a part needs; there are fewer parts where a batch has not as many.

    Raises:
        UnsplittableBatchError: the batch cannot be split, or what `split_batch` gives is not the batch in parts.
    """
    batches, weight = parts_by_hook(module, batch, count), getattr(module, "loss_weight", None)
    if batches is not None:
        sizes = sizes_of(batches)
        return Parts(batches, sizes, weights(batches, sizes, weight), is_by_hook=True)
    layout = layout_of(batch, batch_size) if layout is None else layout
    samples = samples_of(batch, layout)
    count = min(count, max(1, samples // fewest))
    batches, sizes = split(batch, count, layout=layout), part_sizes(samples, count)
    return Parts(batches, sizes, weights(batches, sizes, weight))


def weights(
    batches: Sequence[Any],
    sizes: Sequence[int],
    loss_weight: Callable[[Any], Any] | None = None,
    reduction: str = "mean",
) -> list[float | Tensor]:
    """By which the loss of each part counts in the loss of the batch.

    Example:
        >>> weights(parts, sizes=[3, 1])
        [0.75, 0.25]

    Args:
        batches: the parts.
        sizes: samples of each.
        loss_weight: what a part weighs, as the hook of this name; None, or a hook that gives None: its samples.
        reduction: "mean" for weights that add up to 1, "sum" for a loss that adds up over samples.

    Returns:
        Numbers, or tensors where the hook gives tensors: nothing waits for a device.

    Raises:
        UnsplittableBatchError: the hook says that the parts weigh nothing.
    """
    if reduction == "sum":
        return [1.0] * len(batches)
    given = [None if loss_weight is None else loss_weight(batch) for batch in batches]
    amounts: list[Any] = list(sizes) if any(amount is None for amount in given) else given
    amounts = [amount.detach() if isinstance(amount, Tensor) else amount for amount in amounts]
    total: Any = sum(amounts)
    if not isinstance(total, Tensor) and not total > 0:
        raise UnsplittableBatchError(
            f"`loss_weight` gives {amounts} for the parts of a batch: together they weigh nothing"
        )
    return [amount / total for amount in amounts]


class _Cutter(Mover):
    """Takes ranges of samples as the places of values, so that the walk over a batch is that of moving it."""

    def __init__(self, leaves: Sequence[tuple[Any, int]], start: int, stop: int) -> None:
        self._ranges = _Ranges(leaves, start, stop)
        super().__init__(self._ranges, (start, stop))

    def _is_whole(self, value: Any) -> bool:
        return super()._is_whole(value) or self._ranges.splits(value)

    def _moved(self, value: Any) -> Any:
        if self._ranges.splits(value) and id(value) not in self._stand_ins:
            return self._keep(value, self._ranges.cut(value))
        return super()._moved(value)

    def _move_object(self, value: Any) -> Any:
        moved = self._keep(value, copy.copy(value))  # its own `.to` knows no place but devices
        self._move_attributes(value, moved)
        return moved


class _Ranges(HostLocator):
    """Cuts what has samples to a range of them."""

    def __init__(self, leaves: Sequence[tuple[Any, int]], start: int, stop: int) -> None:
        super().__init__()
        self._dims = {id(value): dim for value, dim in leaves}
        self._start, self._stop = start, stop

    def splits(self, value: Any) -> bool:
        """Whether a value has samples."""
        return id(value) in self._dims

    def place_of(self, tensor: Any) -> Place | None:
        return "whole" if self.splits(tensor) else None

    def cut(self, value: Any) -> Any:
        """The range of a value's samples."""
        if isinstance(value, PackedSequence):
            return sequences_between(value, self._start, self._stop)
        if isinstance(value, Tensor):
            return _narrowed(value, self._dims[id(value)], self._start, self._stop - self._start)
        if isinstance(value, np.ndarray):
            return value[(slice(None),) * self._dims[id(value)] + (slice(self._start, self._stop),)]
        return value[self._start : self._stop]


def _narrowed(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.narrow_copy(dim, start, size)
    # A step may change its batch in place. Were the parts ordinary views, autograd would take a change of one part for
    # a change of all, and refuse the backward of the others.
    own = tensor if tensor.requires_grad else tensor.data
    return own.narrow(dim, start, size)
