"""Which blocks share memory, and so must share a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def find_ties(blocks: Sequence[Sequence[nn.Module]]) -> tuple[tuple[int, ...], ...]:
    """Group the blocks that share a module, a parameter, a buffer, or the memory behind one.

    Example:
        >>> shared = nn.Linear(2, 2)
        >>> find_ties([[nn.Sequential(shared)], [nn.ReLU()], [nn.Sequential(shared)]])
        ((0, 2),)

    Args:
        blocks: the modules of each block.

    Returns:
        Groups of two or more block indices, ascending.
    """
    group_of = list(range(len(blocks)))
    first_holder: dict[int, int] = {}
    kept_alive = []  # an id is unique only while its object lives
    for index, modules in enumerate(blocks):
        for holding in _holdings(modules):
            kept_alive.append(holding)
            first = first_holder.setdefault(id(holding), index)
            joined, kept = group_of[index], group_of[first]
            if joined != kept:
                group_of = [kept if group == joined else group for group in group_of]
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_of):
        groups.setdefault(group, []).append(index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _holdings(modules: Sequence[nn.Module]) -> Iterator[object]:
    """Everything that can be shared: modules that hold tensors, tensors, and their storages."""
    for module in modules:
        for part in module.modules():
            tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if tensors:
                yield part
            for tensor in tensors:
                yield tensor
                yield from _storages(tensor)


def _storages(tensor: Tensor) -> Iterator[object]:
    """The memory behind `tensor`, which views of one tensor share; nothing where there is none or it cannot be told."""
    if is_lazy(tensor) or tensor.numel() == 0:
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return  # tensors without a storage of their own, such as sparse ones, share none
