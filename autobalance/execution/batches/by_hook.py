"""Parts of a batch that the user's `split_batch` makes: held to what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobalance.execution.batches.sample_layout import UnsplittableBatchError, layout_of, samples_of
from autobalance.placement.contents import is_atom, parts, tensors_in
from autobalance.profiling.batches import samples_in


def parts_by_hook(module: Any, batch: Any, count: int) -> list[Any] | None:
    """The parts that `split_batch` makes of a batch, those without samples left out.

    Example:
        >>> len(parts_by_hook(module, batch, 4))
        4

    Args:
        module: whose `split_batch` counts, if it has one.
        batch: what a step is given.
        count: how many parts are wanted.

    Returns:
        Up to `count` parts; None where there is no such hook, or it leaves the batch to others.

    Raises:
        UnsplittableBatchError: the hook gives no list, nothing in it, too many parts, or fewer samples than there are.
    """
    hook = getattr(module, "split_batch", None)
    made = hook(batch, count) if callable(hook) else None
    if made is None:
        return None
    its = f"`split_batch` of {type(module).__name__}"
    if not isinstance(made, (list, tuple)):
        raise UnsplittableBatchError(
            f"{its} gives {type(made).__name__} instead of a list of parts: it is asked for up to {count}, each like a "
            f"batch"
        )
    sizes = [samples_told_by(part) for part in made]
    found = [part for part, size in zip(made, sizes, strict=True) if part is not None and size != 0]
    if not found:
        raise UnsplittableBatchError(
            f"{its} gives {type(made).__name__} without parts{' that have samples' if made else ''}: it is asked for "
            f"up to {count}, each like a batch"
        )
    if len(found) > count:
        raise UnsplittableBatchError(f"{its} gives {len(found)} parts, but is asked for up to {count}")
    _refuse_lost(its, batch, sizes)
    return found


def can_be_split(module: Any, part: Any) -> bool:
    """Whether `split_batch` makes more than one part of one that it has made.

    Example:
        >>> can_be_split(module, parts[0])
        True

    Args:
        module: whose hook it is.
        part: of a batch.
    """
    return len(parts_by_hook(module, part, 2) or ()) > 1


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
    told = [samples_told_by(batch) for batch in batches]
    sizes = [size for size in told if size is not None]
    return sizes if len(sizes) == len(told) else [1] * len(told)


def samples_told_by(batch: Any) -> int | None:
    """How many samples a batch has; None where neither it nor its tensors tell.

    Example:
        >>> samples_told_by(pack_sequence([torch.zeros(3), torch.zeros(2)]))
        2

    Args:
        batch: as for `sizes_of`.
    """
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    tensors = list(tensors_in(batch))
    if tensors and not any(tensor.numel() for tensor in tensors):
        return 0
    try:
        return samples_of(batch, layout_of(batch)) if _has_sequences(batch) else samples_in(batch)
    except ValueError:
        return None


def _has_sequences(batch: Any) -> bool:
    if isinstance(batch, PackedSequence):
        return True
    inside = [] if is_atom(batch) or isinstance(batch, Tensor) else parts(batch)
    return any(isinstance(item, PackedSequence) for item in inside)


def _refuse_lost(its: str, batch: Any, sizes: Sequence[int | None]) -> None:
    """Refuse parts that have fewer samples together than their batch.

    That they seem to have more may be a first dimension that is not that of the samples.
    """
    whole, told = samples_told_by(batch), [size for size in sizes if size is not None]
    if whole is not None and len(told) == len(sizes) and sum(told) < whole:
        raise UnsplittableBatchError(
            f"{its} loses samples: its parts have {' + '.join(map(str, told))} = {sum(told)} of the {whole} of a "
            f"batch, and every sample has to be in one of them"
        )
