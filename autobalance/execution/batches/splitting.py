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
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

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
from autobalance.profiling.batches import samples_in


@dataclass(frozen=True)
class Parts:
    """A batch in parts.

    Attributes:
        batches: the parts, in the order of their samples.
        sizes: samples of each.
        weights: by which the loss of each counts; they add up to 1.
    """

    batches: Sequence[Any]
    sizes: Sequence[int]
    weights: Sequence[float | Tensor]


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
        UnsplittableBatchError: the batch cannot be split, or `split_batch` gives no parts.
    """
    batches = _by_hook(module, batch, count)
    if batches is None:
        layout = layout_of(batch, batch_size) if layout is None else layout
        samples = samples_of(batch, layout)
        count = min(count, max(1, samples // fewest))
        batches = split(batch, count, layout=layout)
        sizes = part_sizes(samples, count)
    else:
        sizes = sizes_of(batches)
    return Parts(batches, sizes, weights(batches, sizes, getattr(module, "loss_weight", None)))


def sizes_of(batches: Sequence[Any]) -> list[int]:
    """Samples of parts that the user has made.

    Example:
        >>> sizes_of([torch.zeros(3, 2), torch.zeros(2, 2)])
        [3, 2]

    Args:
        batches: tensors in any nesting, or objects that say their number of samples as `num_graphs`.

    Returns:
        The sizes; 1 for each part if they cannot be told, so that all count alike.
    """
    sizes = []
    for batch in batches:
        graphs = getattr(batch, "num_graphs", None)
        try:
            sizes.append(graphs if isinstance(graphs, int) else samples_in(batch))
        except ValueError:
            return [1] * len(batches)
    return sizes


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


def _by_hook(module: Any, batch: Any, count: int) -> list[Any] | None:
    hook = getattr(module, "split_batch", None)
    made = hook(batch, count) if callable(hook) else None
    if made is None:
        return None
    if not isinstance(made, (list, tuple)) or not made:
        raise UnsplittableBatchError(
            f"`split_batch` of {type(module).__name__} gives {type(made).__name__} "
            f"{'without parts' if isinstance(made, (list, tuple)) else 'instead of a list of parts'}: it is asked for "
            f"up to {count}, each like a batch"
        )
    return list(made)


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
            return _packed(value, self._start, self._stop)
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


def _packed(sequence: PackedSequence, start: int, stop: int) -> PackedSequence:
    samples = unpack_sequence(sequence)[start:stop]
    return pack_sequence(samples, enforce_sorted=sequence.sorted_indices is None)
