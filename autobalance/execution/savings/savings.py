"""What blocks do to hold less memory, installed as a plan has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from autobalance.blocks import Blocks
from autobalance.execution.running import Running
from autobalance.execution.savings.offload import offload
from autobalance.execution.savings.recompute import recompute
from autobalance.execution.savings.streaming import Streaming, stream
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
        ValueError: if `methods` names something that is no block, or has no such method, or a weight that streams is
            used by others; nothing is installed then.
    """
    removes: list[Remove] = []
    saving = running.saving or ("keep",) * len(blocks)
    if not any(word != "keep" for word in saving) and not running.streamed:
        return removes
    called = methods_by_module(root, blocks, methods or {})
    refuse_shared_weights(root, blocks, running.streamed)
    last: dict[torch.device, Streaming] = {}
    for index, word in enumerate(saving):
        door, device = Door(blocks.names[index], places[index], locator), devices[index]
        for module in blocks.modules[index]:
            names = ["forward", *called.get(id(module), ())]
            if index in running.streamed and device.type != "cpu":
                streaming = Streaming(door, device, module, word, before=last.get(device))
                if streaming.before is not None:
                    streaming.before.following = streaming
                last[device] = streaming
                removes += stream(streaming, names)
            elif word == "offload":
                removes += offload(door, device, module, names)
            if word == "recompute":
                removes += recompute(door, device, module, names)
    return removes


def homes_of(running: Running, places: Sequence[torch.device]) -> list[torch.device]:
    """Where the weights of each block are: on its device, or on the host.

    Example:
        >>> homes_of(Running(streamed=(1,)), [torch.device("cuda", 0)] * 2)
        [device(type='cuda', index=0), device(type='cpu')]

    Args:
        running: which blocks stream.
        places: the device of each block.
    """
    host = torch.device("cpu")
    return [host if index in running.streamed else place for index, place in enumerate(places)]


def pin_streamed(blocks: Blocks, running: Running, devices: Sequence[torch.device]) -> None:
    """Pin the host memory of weights that stream, so that copies run beside the work of a GPU.

    Example:
        >>> pin_streamed(blocks, running_of(plan), devices)     # doctest: +SKIP

    Args:
        blocks: the blocks, placed.
        running: which of them stream.
        devices: the device of each.
    """
    for index in running.streamed:
        for module in blocks.modules[index] if devices[index].type == "cuda" else ():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.data.pin_memory()


def refuse_shared_weights(root: nn.Module, blocks: Blocks, streamed: Collection[int]) -> None:
    """Refuse blocks that stream weights which others use on a device.

    Example:
        >>> refuse_shared_weights(model, blocks, streamed=[2])     # doctest: +SKIP

    Args:
        root: the model.
        blocks: its blocks.
        streamed: indices of those that stream.

    Raises:
        ValueError: naming the weight, and who shares it.
    """
    streaming = {id(part) for index in streamed for module in blocks.modules[index] for part in module.modules()}
    known: dict[int, str] = {}
    elsewhere: dict[int, str] = {}
    for prefix, part in root.named_modules(remove_duplicate=False):
        for name, tensor in part.named_parameters(recurse=False, remove_duplicate=False):
            (known if id(part) in streaming else elsewhere).setdefault(id(tensor), f"{prefix}.{name}".lstrip("."))
    shared = known.keys() & elsewhere.keys()
    if shared:
        one = min(shared, key=known.__getitem__)
        raise ValueError(
            f"the plan streams {known[one]!r} from the host, but {elsewhere[one]!r} is the same weight and stays on "
            f"its device: stream both blocks, or neither; with offload=False nothing streams."
        )
