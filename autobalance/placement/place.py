"""Put every tensor of a model on its device, block by block: the whole model is never on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autobalance.blocks import Blocks


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
        loose: device by the qualified name of a parameter or buffer outside every block.
        root_device: for loose tensors that `loose` does not name, and for modules without tensors such as metrics.
    """
    for modules, device in zip(blocks.modules, devices, strict=True):
        for module in modules:
            module.to(device)
    inside = {id(part) for modules in blocks.modules for module in modules for part in module.modules()}
    holders = {id(part) for part in root.modules() if any(id(child) in inside for child in part.modules())}
    for prefix, module in root.named_modules():
        if id(module) in inside:
            continue
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None:
                move_tensor(module, name, loose.get(f"{prefix}.{name}" if prefix else name, root_device))
        if not own and id(module) not in holders and module is not root:
            module.to(root_device)  # metrics and the like keep their state in plain attributes


def move_tensor(module: nn.Module, name: str, device: torch.device) -> None:
    """Move one parameter or buffer of `module`, as `module.to` would move all of them."""
    holder = nn.Module()
    if name in module._parameters:
        holder._parameters["tensor"] = module._parameters[name]
        holder.to(device)
        module._parameters[name] = holder._parameters["tensor"]
    else:
        holder._buffers["tensor"] = module._buffers[name]
        holder.to(device)
        module._buffers[name] = holder._buffers["tensor"]


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
