"""What a model's blocks hold, to be compared with the plan that places them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autobalance.blocks import Blocks
from autobalance.partitioning.plan import Plan
from autobalance.profiling.timeline import ROOT

# Devices give memory in pieces of this size or of a divisor of it.
_GRANULE = 512


def weights_held(model: nn.Module, blocks: Blocks, plan: Plan) -> dict[str, tuple[int, int]]:
    """By block, the least and most bytes that a profile can say its weights take.

    Weights that several blocks hold count with one of them, loose ones with the block that they live with.

    Example:
        >>> weights_held(model, find_blocks(model), plan)      # doctest: +SKIP
        {'0': (16640, 16896), '2': (2080, 2560)}

    Args:
        model: that the blocks are of.
        blocks: of the model.
        plan: for blocks of the same names; says with which block loose weights live.

    Returns:
        Only blocks whose weights are plain tensors of a known shape.
    """
    parameters = {name: _parameters(modules) for name, modules in zip(blocks.names, blocks.modules, strict=True)}
    holders = Counter(key for each in parameters.values() for key in each)
    beside: Counter[str] = Counter()
    for name, owner in plan.loose:
        # What the root holds stands in the last block's row.
        block = plan.block_names[-1 if owner == ROOT else owner]
        beside[block] += sum(map(_rounded, _loose(model, name)))
    return {
        name: (
            sum(tensor.nbytes for key, tensor in each.items() if holders[key] == 1),
            sum(map(_rounded, each.values())) + beside[name],
        )
        for name, each in parameters.items()
        if all(_is_plain(tensor) for tensor in each.values())
    }


def _parameters(modules: tuple[nn.Module, ...]) -> dict[int, Tensor]:
    return {id(parameter): parameter for module in modules for parameter in module.parameters()}


def _loose(model: nn.Module, name: str) -> Iterator[Tensor]:
    """The parameters of a loose module, or the loose parameter itself."""
    around, _, last = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(around), last, None)
    except AttributeError:  # the model lacks it: nothing of it is held
        return
    if isinstance(found, nn.Module):
        yield from found.parameters()
    elif isinstance(found, nn.Parameter):
        yield found


def _is_plain(tensor: Tensor) -> bool:
    """Whether a parameter's bytes are those of its elements: not of a packed, lazy or otherwise special one."""
    return type(tensor) in (nn.Parameter, Tensor) and type(tensor.data) is Tensor and not is_lazy(tensor)


def _rounded(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) else -(-tensor.nbytes // _GRANULE) * _GRANULE


def memory_of(device: torch.device) -> int | None:
    """Bytes that a device has in all; None for the host, which lends to the disk what it has not.

    Example:
        >>> memory_of(torch.device("cpu"))

    Args:
        device: with its index.
    """
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).mem_get_info(device)[1])
