"""Where accelerate would put a model's blocks: its own functions, asked about the profile's rows.

accelerate looks at nothing but names, classes and weights, so that a tree of modules on meta with the names, classes
and weights of the blocks is to it the model itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from autobalance.profiling.profile import Profile


def accelerate_map(profile: Profile, budgets: Sequence[int]) -> list[int | str]:
    """accelerate's `infer_auto_device_map`, with the limits of its `get_balanced_memory`, as `device_map="auto"` does.

    Classes of which there are several blocks are not split, which is what transformers asks for of its layers.

    Example:
        >>> accelerate_map(profile, [40 * 2**30] * 2)      # doctest: +SKIP
        [0, 0, 0, 1, 1]

    Args:
        profile: what the blocks cost, of which accelerate uses names, classes and weights.
        budgets: bytes that each device may hold.

    Returns:
        Per block the index of its device, or "disk" where accelerate finds room on none.

    Raises:
        ImportError: accelerate is missing.
    """
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory
    except ImportError as error:
        raise ImportError(f"accelerate is missing ({error}): pip install accelerate") from error
    tree = module_tree(profile)
    kinds = Counter(block.kind for block in profile.blocks)
    whole = [_class_name(kind) for kind, count in kinds.items() if kind and count > 1]
    with _quiet():
        limits = get_balanced_memory(tree, max_memory=dict(enumerate(budgets)), no_split_module_classes=whole)
        found = infer_auto_device_map(tree, max_memory=limits, no_split_module_classes=whole, clean_result=False)
    return [_place(found, block.members[0]) for block in profile.blocks]


def module_tree(profile: Profile) -> nn.Module:
    """Modules on meta with the names, classes and weights of a profile's blocks.

    Of a block that is made of several modules the first has all the weights. Blocks that must share a device share a
    tensor: one that has no weights of its own all those of the largest, for that is how a row tells of tied weights.

    Example:
        >>> [name for name, _ in module_tree(profile).named_parameters()]       # doctest: +SKIP
        ['embed.weights', 'layers.0.weights', 'layers.1.weights']

    Args:
        profile: what the blocks cost.
    """
    import torch
    from torch import nn

    def bytes_on_meta(size: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)

    root = nn.Module()
    modules = []
    for block in profile.blocks:
        leaves = [_leaf(root, member, block.kind) for member in block.members]
        leaves[0].register_parameter("weights", bytes_on_meta(block.weights))
        modules.append(leaves[0])
    for number, group in enumerate(profile.together):
        largest = max(group, key=lambda member: profile.blocks[member].weights)
        heavy = [member for member in group if profile.blocks[member].weights]
        for member in group:
            if member not in heavy:
                modules[member].register_parameter("weights", modules[largest].get_parameter("weights"))
        link = bytes_on_meta(1)
        for member in heavy if len(heavy) > 1 else ():
            modules[member].register_parameter(f"tied{number}", link)
    return root


def _leaf(root: nn.Module, name: str, kind: str) -> nn.Module:
    """The module of this name, with the modules around it."""
    from torch import nn

    module = root
    parts = name.split(".") if name else ["model"]
    for depth, part in enumerate(parts, start=1):
        inner = dict(module.named_children()).get(part)
        if inner is None:
            inner = type(_class_name(kind), (nn.Module,), {})() if depth == len(parts) else nn.Module()
            module.add_module(part, inner)
        module = inner
    return module


def _class_name(kind: str) -> str:
    """A name that no class of torch has, for accelerate knows some of them."""
    return f"Block{kind}"


def _place(found: dict[str, int | str], name: str) -> int | str:
    """What a map says of a module: of itself, of a part of it, or of one that contains it."""
    wanted = name or "model"
    for listed, place in found.items():
        if listed == wanted or listed.startswith(f"{wanted}."):
            return place
    around = wanted
    while around and around not in found:
        around = around.rpartition(".")[0]
    return found[around]


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, accelerate does not warn that this machine lacks the devices that are planned for."""
    logger = logging.getLogger("accelerate")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
