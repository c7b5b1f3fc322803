"""Put every tensor of a model on its device, block by block: the whole model is never on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.compat import moves_more_than_tensors


def place(
    root: nn.Module,
    blocks: Blocks,
    devices: Sequence[torch.device],
    loose: Mapping[str, torch.device],
    root_device: torch.device,
) -> None:
    """Move each block to its device, each tensor outside every block to its user's, and the rest to the root device.

    Parameters keep their identity, so optimizers built before see the placed ones.

    Example:
        >>> place(model, blocks, [gpu_0, gpu_1], {"scale": gpu_1}, root_device=gpu_1)  # doctest: +SKIP

    Args:
        root: the model.
        blocks: its blocks.
        devices: one per block.
        loose: device by the qualified name of a parameter or buffer outside every block, or of a module that holds it.
        root_device: for what `loose` does not name, and for modules without tensors such as metrics.
    """
    for modules, device in zip(blocks.modules, devices, strict=True):
        for module in modules:
            module.to(device)
    inside = {id(part) for modules in blocks.modules for module in modules for part in module.modules()}
    holders = {id(part) for part in root.modules() if any(id(child) in inside for child in part.modules())}
    placed = _Placed(tensor for modules in blocks.modules for module in modules for tensor in module.parameters())
    for prefix, module in root.named_modules():
        if id(module) in inside:
            continue
        names = [name for name, _ in _own_tensors(module)]
        target = {name: _device_of(f"{prefix}.{name}" if prefix else name, loose, root_device) for name in names}
        if id(module) not in holders and moves_more_than_tensors(module):
            module.to(next(iter(target.values()), root_device))
        for name, tensor in list(_own_tensors(module)):
            setattr(module, name, placed.at(tensor, target[name]))


class _Placed:
    """Tensors that have been placed: one with several names is placed once, with its block or its first name."""

    def __init__(self, placed: Iterable[Tensor]) -> None:
        # The originals are held, so that no other tensor can get the id of one of them.
        self._known = {id(tensor): (tensor, tensor) for tensor in placed}

    def at(self, tensor: Tensor, device: torch.device) -> Tensor:
        """What stands for `tensor` now: itself, moved to `device`, or where it was placed before."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, _moved(tensor, device)
        return self._known[id(tensor)][1]


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a module itself registers, by name, tied ones under each of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _device_of(name: str, loose: Mapping[str, torch.device], root_device: torch.device) -> torch.device:
    while name:
        if name in loose:
            return loose[name]
        name = name.rpartition(".")[0]
    return root_device


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A parameter or buffer after its module, had it no other, was moved: the same object for a parameter."""
    holder = nn.Module()
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter("tensor", tensor)
    else:
        holder.register_buffer("tensor", tensor)
    moved = holder.to(device).tensor
    assert isinstance(moved, Tensor)
    return moved


def loose_tensors(root: nn.Module, blocks: Blocks) -> dict[str, Tensor]:
    """Parameters and buffers outside every block, by qualified name; tied ones under their first name only.

    Args:
        root: the model.
        blocks: its blocks.

    Returns:
        Tensors in the order in which the model registers them.
    """
    owned = {
        id(tensor)
        for modules in blocks.modules
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    found = {}
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if id(tensor) not in owned:
            owned.add(id(tensor))
            found[name] = tensor
    return found
