"""What blocks do to hold less memory, installed as a plan has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autobalance.blocks import Blocks
from autobalance.execution.offload import offload
from autobalance.execution.recompute import recompute
from autobalance.execution.running import Running
from autobalance.placement.hooks import Door, Remove
from autobalance.placement.install import methods_by_module
from autobalance.placement.locate import Locator, Place


def install_savings(
    root: nn.Module,
    blocks: Blocks,
    running: Running,
    places: Sequence[Place],
    devices: Sequence[torch.device],
    locator: Locator,
    methods: Mapping[str, Sequence[str]] | None = None,
) -> list[Remove]:
    """Let blocks recompute, offload and stream; before their doors are installed, which are outside of that.

    Example:
        >>> removes = install_savings(model, blocks, running_of(plan), devices, devices, locator)  # doctest: +SKIP

    Args:
        root: the model that holds the blocks.
        blocks: the blocks, in order.
        running: what each does.
        places: one per block.
        devices: the torch device of each block.
        locator: knows where tensors are.
        methods: names of methods other than `forward` that run a block, by the name of the block or of a module in it.

    Returns:
        What undoes it, to be called last to first, after the doors are off.

    Raises:
        ValueError: if `methods` names something that is no block, or has no such method; nothing is installed then.
    """
    removes: list[Remove] = []
    if not any(word != "keep" for word in running.saving) and not running.streamed:
        return removes
    called = methods_by_module(root, blocks, methods or {})
    for index, word in enumerate(running.saving):
        door, device = Door(blocks.names[index], places[index], locator), devices[index]
        for module in blocks.modules[index]:
            names = ["forward", *called.get(id(module), ())]
            if word == "recompute":
                removes += recompute(door, device, module, names)
            elif word == "offload":
                removes += offload(door, device, module, names)
    return removes
