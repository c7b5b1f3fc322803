"""Where a batch has its samples: which dimension of each tensor, and which lists hold one item for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobalance.placement.contents import attributes, is_atom, parts

Layout: TypeAlias = Mapping[str, int]
"""Which dimension counts the samples, by the name of the value; what is not in it is the same for all samples."""


class UnsplittableBatchError(ValueError):
    """A batch cannot be split into micro-batches.

    Example:
        >>> split((torch.zeros(4, 2), torch.zeros(3)), 2)
        UnsplittableBatchError: tensors of the batch have different first dimensions: batch[0] is (4, 2), ...
    """


class Leaf(NamedTuple):
    """A value that is split, or shared, as one.

    Attributes:
        name: in words such as "batch['images'][0]".
        value: a tensor, an array, a packed sequence or a list.
    """

    name: str
    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions; those of a list are its length, of a packed sequence its samples."""
        if isinstance(self.value, PackedSequence):
            return (int(self.value.batch_sizes[0]),)
        return tuple(self.value.shape) if isinstance(self.value, (Tensor, np.ndarray)) else (len(self.value),)

    def __str__(self) -> str:
        return f"{self.name} is {self.shape}" if isinstance(self.value, Tensor) else f"{self.name} has {self.shape[0]}"


def layout_of(batch: Any, batch_size: int | None = None) -> Layout:
    """Where each value of a batch has its samples.

    That is the first dimension if all tensors agree on it, else the one dimension of each tensor whose size is the
    number of samples. Tensors without such a dimension are the same for all samples, as are numbers.

    Example:
        >>> layout_of({"x": torch.zeros(5, 8), "y": torch.zeros(8), "scale": torch.ones(3)}, batch_size=8)
        {"batch['x']": 1, "batch['y']": 0}

    Args:
        batch: tensors, arrays, packed sequences and lists in any nesting.
        batch_size: how many samples it has, if known; needed where tensors have different first dimensions.

    Raises:
        UnsplittableBatchError: how many samples there are, or where, is not known.
    """
    samples = _samples(batch, batch_size)
    found = [leaf for leaf in _walk(batch, samples) if leaf.shape]
    if all(leaf.shape[0] == samples for leaf in found) and found:
        return {leaf.name: 0 for leaf in found}
    candidates = {leaf.name: _dimensions_of_size(leaf, samples) for leaf in found}
    certain = {dims[0] for dims in candidates.values() if len(dims) == 1}
    layout = {}
    for leaf in found:
        dims = candidates[leaf.name]
        if len(dims) > 1:
            dims = [dim for dim in dims if certain == {dim}]
            if not dims:
                raise UnsplittableBatchError(
                    f"more than one dimension of {leaf.name}, whose shape is {leaf.shape}, could count the {samples} "
                    f"samples of the batch. {_HOOK}"
                )
        if dims:
            layout[leaf.name] = dims[0]
    if not layout:
        raise UnsplittableBatchError(
            f"nothing in the batch has a dimension of {samples}, the number of its samples ({_listed(found)}). {_HOOK}"
        )
    return layout


def samples_of(batch: Any, layout: Layout) -> int:
    """How many samples a batch has whose values are laid out in this way.

    Example:
        >>> samples_of({"x": torch.zeros(5, 3)}, {"batch['x']": 1})
        3

    Args:
        batch: may have another number of samples than the batch of which `layout` is.
        layout: by `layout_of`.

    Raises:
        UnsplittableBatchError: its values have different numbers of samples, or none.
    """
    found = leaves_in(batch, layout)
    sizes = {leaf.shape[layout[leaf.name]] for leaf in found if len(leaf.shape) > layout[leaf.name]}
    if len(sizes) != 1 or len(found) != len(layout):
        raise UnsplittableBatchError(f"this batch is laid out differently than the first ({_listed(found)}). {_HOOK}")
    return sizes.pop()


def leaves_in(batch: Any, layout: Layout) -> list[Leaf]:
    """The values of a batch that have samples, each once, by name.

    Args:
        batch: as a step is given it.
        layout: where its samples are.
    """
    return [leaf for leaf in _walk(batch, set(layout)) if leaf.name in layout]


def is_sample_list(value: Any, samples: int) -> bool:
    """Whether a list holds one item for each sample, and not one tensor for each feature.

    Example:
        >>> is_sample_list(["a.png", "b.png"], 2), is_sample_list([torch.zeros(2, 5), torch.zeros(2)], 2)
        (True, False)

    Args:
        value: anything.
        samples: how many samples there are.
    """
    if type(value) not in (list, tuple) or len(value) != samples:
        return False
    tensors = [leaf.value for leaf in _walk(value, 0) if isinstance(leaf.value, Tensor)]
    if not tensors:
        return any(item is not None for item in value)
    if len({(type(item), item.dim() if isinstance(item, Tensor) else 1) for item in value}) > 1:
        return False
    return tensors[0].dim() > 0 and not all(tensor.dim() and tensor.shape[0] == samples for tensor in tensors)


def _dimensions_of_size(leaf: Leaf, samples: int) -> list[int]:
    return [dim for dim, size in enumerate(leaf.shape) if size == samples]


def _samples(batch: Any, batch_size: int | None) -> int:
    """The number given, unless this batch is another: the last of an epoch may be smaller."""
    if batch_size and any(batch_size in leaf.shape for leaf in _walk(batch, batch_size)):
        return batch_size
    return _agreed_samples(batch)


def _agreed_samples(batch: Any) -> int:
    """The first dimension that all tensors have in common; lists count where there are no tensors beside them."""
    found = [leaf for leaf in _walk(batch, None) if leaf.shape]
    votes = [leaf for leaf in found if not isinstance(leaf.value, (list, tuple))] or found
    sizes = {leaf.shape[0] for leaf in votes}
    if len(sizes) > 1:
        raise UnsplittableBatchError(f"tensors of the batch have different first dimensions: {_listed(votes)}. {_HOOK}")
    if sizes <= {0}:
        raise UnsplittableBatchError(f"the batch ({type(batch).__name__}) holds no tensor with samples. {_HOOK}")
    return sizes.pop()


def _walk(batch: Any, whole: int | set[str] | None) -> Iterator[Leaf]:
    """Leaves of a batch, each object once.

    Args:
        batch: anything.
        whole: which lists are leaves: those with so many samples, those of these names, or, if it is None, those that
            look as if they held samples.
    """
    seen = set[int]()
    unread = [Leaf("batch", batch)]
    while unread:
        leaf = unread.pop()
        if is_atom(leaf.value) or id(leaf.value) in seen:
            continue
        seen.add(id(leaf.value))
        if isinstance(leaf.value, (Tensor, np.ndarray, PackedSequence)) or _is_whole_list(leaf, whole):
            yield leaf
        else:
            unread += reversed(list(_named_parts(leaf)))


def _is_whole_list(leaf: Leaf, whole: int | set[str] | None) -> bool:
    if isinstance(whole, set):
        return type(leaf.value) in (list, tuple) and leaf.name in whole
    return is_sample_list(leaf.value, whole) if whole else whole is None and _looks_like_samples(leaf.value)


def _looks_like_samples(value: Any) -> bool:
    """Whether all items of a list are of one kind, none of which can be told to be a feature of all samples."""
    if type(value) not in (list, tuple) or not value or len({type(item) for item in value}) != 1:
        return False
    first = value[0]
    if isinstance(first, Tensor):
        rows = [tensor.shape[:1] for tensor in value]
        rests = {(tensor.dim(), tensor.shape[1:], tensor.dtype) for tensor in value}
        return len(set(rows)) > 1 and len(rests) == 1
    if isinstance(first, Mapping):
        return len({tuple(item) for item in value}) == 1 and len(value) > 1
    return (first is not None and not isinstance(first, (Sequence, np.ndarray))) or isinstance(first, (str, bytes))


def _named_parts(leaf: Leaf) -> Iterator[Leaf]:
    """What a value holds, by name."""
    value, names = leaf.value, dict[int, str]()
    if isinstance(value, Mapping):
        names.update({id(item): f"[{key!r}]" for key, item in reversed(list(value.items()))})
    elif hasattr(value, "_fields"):
        names.update({id(item): f".{name}" for name, item in zip(value._fields, value, strict=False)})
    elif isinstance(value, Sequence):
        names.update({id(item): f"[{index}]" for index, item in reversed(list(enumerate(value)))})
    for name, item in attributes(value).items():
        names.setdefault(id(item), f".{name}")
    for item in parts(value):
        yield Leaf(leaf.name + names.get(id(item), ""), item)


def _listed(found: Sequence[Leaf], most: int = 4) -> str:
    shown = ", ".join(map(str, found[:most])) or "it holds no tensors"
    return shown + (f" and {len(found) - most} more" if len(found) > most else "")


_HOOK = "Define `split_batch(self, batch, n)` in the LightningModule to say how such a batch is split."
