"""A few samples of a batch, together and in two parts: what the equivalence of whole and parts is tested on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autobalance.execution.batches.by_hook import can_be_split, parts_by_hook, samples_told_by
from autobalance.execution.batches.sample_layout import Layout, UnsplittableBatchError, layout_of, leaves_in, samples_of
from autobalance.execution.batches.splitting import Parts, parts_of, samples_between
from autobalance.placement.contents import elements_in

MOST = 5
"""Samples: as 3 and 2, of different sizes, so that a mean and a sum of means differ."""
_SLICES = 8
_IGNORED = (-100, 255, 0)
"""Targets that losses leave out by convention, or padding."""


class Portion(NamedTuple):
    """How much of a batch one part of the run has at most: the plan has memory for that.

    Attributes:
        parts: of the batch.
        samples: in a part; 1 where nobody counts them.
        elements: in a part.
    """

    parts: int
    samples: int
    elements: int

    @classmethod
    def of(cls, parts: Parts) -> Portion:
        """That of the largest of some parts.

        Args:
            parts: of one batch.
        """
        return cls(len(parts.sizes), max(parts.sizes), max(map(elements_in, parts.batches)))


@dataclass(frozen=True)
class FewSamples:
    """Samples of a batch.

    Attributes:
        whole: them all.
        parts: the same samples in parts.
        sizes: samples of each part.
        weights: of each part by the user's `loss_weight`, adding up to 1; None without that hook.
    """

    whole: Any
    parts: Sequence[Any]
    sizes: Sequence[int]
    weights: Sequence[float] | None = None

    @property
    def apart(self) -> str:
        """The parts in words."""
        return f"{' and '.join(map(str, self.sizes))} apart"

    def __str__(self) -> str:
        return f"{sum(self.sizes)} samples at once and {self.apart}"


def few_samples(
    module: Any,
    batch: Any,
    layout: Layout | None = None,
    most: int = MOST,
    portion: Portion | None = None,
    others: bool = False,
) -> FewSamples | None:
    """Some samples of a batch; of the first few slices, one in which samples have different numbers of ignored targets.

    Example:
        >>> few_samples(module, torch.zeros(16, 3)).sizes
        [3, 2]

    Args:
        module: whose `split_batch` and `loss_weight` count, if it has them.
        batch: what a step is given.
        layout: where the samples are.
        most: how many samples are wanted; fewer if there are fewer.
        portion: how much of the batch a part of the run has; None: that is not said.
        others: whether those are wanted that stand next to the ones which are given else.

    Returns:
        The samples; None if the batch has only one, or no others.

    Raises:
        UnsplittableBatchError: the batch cannot be split.
    """

    def found() -> Iterator[FewSamples]:
        halved = (_halved(module, some, layout) for some in slices(module, batch, layout, most, portion))
        return (few for few in halved if few is not None)

    # Made again, so that none is held beside another: not all are views of the batch.
    told = [_tells(few) for few in found()]
    if len(told) < 1 + others:
        return None
    best = told.index(max(told))
    return next(islice(found(), (best + others) % len(told), None))


def counts_in(parts: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """What a loss may be a mean over, if not over samples: as an expression on `batch`, and its value for each part.

    Example:
        >>> next(iter(counts_in([{"y": torch.tensor([[5, -100]])}, {"y": torch.tensor([[5, 5]])}], [1, 1])))
        ("(batch['y'] != -100).sum()", [1.0, 2.0])

    Args:
        parts: of a batch.
        sizes: samples of each.
    """
    leaves = [_named_tensors(part, size) for part, size in zip(parts, sizes, strict=True)]
    names = [name for name in leaves[0] if all(name in each and each[name].dim() for each in leaves)]
    columns = {name: [each[name] for each in leaves] for name in names}
    for ignored in _IGNORED:
        for name, tensors in columns.items():
            if tensors[0].is_floating_point() or tensors[0].dtype is torch.bool:
                continue
            yield f"({name} != {ignored}).sum()", [float((tensor != ignored).sum()) for tensor in tensors]
            if tensors[0].dim() > 1:  # targets that are the inputs, one step ahead
                ahead = [float((tensor[:, 1:] != ignored).sum()) for tensor in tensors]
                yield f"({name}[:, 1:] != {ignored}).sum()", ahead
    for name, tensors in columns.items():
        if all(_counts(tensor) for tensor in tensors):
            yield f"{name}.sum()", [float(tensor.sum()) for tensor in tensors]


def _counts(tensor: Tensor) -> bool:
    """Whether a tensor is a mask, or holds lengths."""
    is_mask = bool(((tensor == 0) | (tensor == 1)).all())
    return is_mask or (tensor.dim() == 1 and not tensor.is_floating_point() and bool((tensor >= 0).all()))


def _named_tensors(part: Any, size: int) -> dict[str, Tensor]:
    try:
        found = leaves_in(part, layout_of(part, size))
    except UnsplittableBatchError:
        return {}
    return {leaf.name: leaf.value for leaf in found if isinstance(leaf.value, Tensor)}


def slices(module: Any, batch: Any, layout: Layout | None, most: int, portion: Portion | None = None) -> Iterator[Any]:
    """Samples of a batch that stand one after the other, from its begin on, or as the user's `split_batch` gives them.

    None has more elements than a part of the run, if there is one that has as few. Each is made when it is asked for:
    not all are views of the batch.

    Example:
        >>> [len(some) for some in slices(module, torch.zeros(8, 3), None, 2)]
        [2, 2, 2, 2]

    Args:
        module, batch, layout, portion: as for `few_samples`.
        most: how many samples each has at most, where they can be counted.
    """
    made = _slices_by_hook(module, batch, most, 1 if portion is None else portion.parts)
    if made is not None:
        while made:
            yield made.pop(0)
        return
    found = _slices_along(batch, layout_of(batch) if layout is None else layout, most)
    yield from found if portion is None else _up_to(portion.elements, found)


def _up_to(limit: int, found: Iterator[Any]) -> Iterator[Any]:
    """Those with at most so many elements; the smallest if there are none."""
    smallest, are_any = None, False
    for some in found:
        if elements_in(some) <= limit:
            are_any = True
            yield some
        elif smallest is None or elements_in(some) < elements_in(smallest):
            smallest = some
    if not are_any:
        yield smallest


def _slices_along(batch: Any, layout: Layout, most: int) -> Iterator[Any]:
    samples = samples_of(batch, layout)
    size = min(most, samples)
    size -= size > 2 and size % 2 == 0  # in parts of different sizes
    starts = [*range(0, samples - size, size), samples - size]
    for start in starts[:_SLICES]:
        yield samples_between(batch, start, start + size, layout)


def _slices_by_hook(module: Any, batch: Any, most: int, count: int) -> list[Any] | None:
    """Samples as `split_batch` gives them: of one part of the run, or two such parts where none can be split."""
    parts = parts_by_hook(module, batch, count)
    if parts is None:
        return None
    largest_first = sorted(parts, key=elements_in, reverse=True)
    some = next((part for part in largest_first if can_be_split(module, part)), None)
    pairs = -(-len(parts) // 2)
    del parts, largest_first  # where what is made next needs the room
    if some is None:
        return [min(parts_by_hook(module, batch, pairs) or [], key=elements_in)]
    samples = samples_told_by(some)
    if samples is None:
        # A half of what the plan has memory for, where that has parts itself.
        halves = parts_by_hook(module, some, 2) or []
        return [next((half for half in halves if can_be_split(module, half)), some)]
    return [some] if samples <= most else parts_by_hook(module, some, -(-samples // most))


def _halved(module: Any, some: Any, layout: Layout | None) -> FewSamples | None:
    halves = parts_of(module, some, 2, layout=layout)
    if len(halves.batches) < 2:
        return None
    return FewSamples(some, halves.batches, halves.sizes, _by_hook(module, halves))


def _by_hook(module: Any, parts: Parts) -> list[float] | None:
    hook = getattr(module, "loss_weight", None)
    if not callable(hook) or hook(parts.batches[0]) is None:
        return None
    return [float(weight) for weight in parts.weights]


def _tells(few: FewSamples) -> tuple[bool, list[bool]]:
    """How much samples tell: nothing where no target of theirs counts."""
    return few.weights is None or bool(np.isfinite(few.weights).all()), _unlike(few)


def _unlike(few: FewSamples) -> list[bool]:
    """Of the counts with ignored targets, which have other shares in the parts than samples have."""
    shares = np.array(few.sizes) / sum(few.sizes)
    counts = [np.array(count) for name, count in counts_in(few.parts, few.sizes) if "!=" in name]
    return [not np.allclose(count / max(1.0, count.sum()), shares) for count in counts]
