"""Install the doors of all blocks on a model, and the glue between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.placement.glue import glue
from autobalance.placement.hooks import Door, Remove, hook_block, hook_method
from autobalance.placement.locate import Locator, Place


class Installed:
    """Hooks of one placement on one model; `remove` takes them off, `glue` wraps each call of the user's code.

    Args:
        root: the model.
        locator: knows where tensors are and sends them.
        removes: takes the hooks off.
    """

    def __init__(self, root: nn.Module, locator: Locator, removes: Sequence[Remove]) -> None:
        self._root = root
        self._locator = locator
        self._removes = list(removes)
        self._home: set[int] | None = None

    def remove(self) -> None:
        """Take every hook off; may be called again."""
        while self._removes:
            self._removes.pop()()

    def glue(self) -> AbstractContextManager[None]:
        """A context in which the user's operations outside blocks run where their operands are."""
        return glue(self._locator, self._is_home)

    def _is_home(self, tensor: Tensor) -> bool:
        if self._home is None:  # not before: while a copied model is put together its tensors are not there yet
            self._home = {id(tensor) for tensor in (*self._root.parameters(), *self._root.buffers())}
        return id(tensor) in self._home

    def __reduce__(self) -> tuple[Any, ...]:
        return Installed, (self._root, self._locator, ())


def install(
    root: nn.Module,
    blocks: Blocks,
    places: Sequence[Place],
    locator: Locator,
    methods: Mapping[str, Sequence[str]] | None = None,
) -> Installed:
    """Hook every block so that its inputs move to its place.

    Example:
        >>> installed = install(model, blocks, devices, DeviceLocator(devices))  # doctest: +SKIP
        >>> with installed.glue():                                               # doctest: +SKIP
        ...     loss = model(batch)

    Args:
        root: the model that holds the blocks.
        blocks: the blocks, in order.
        places: one per block.
        locator: knows where tensors are and sends them.
        methods: names of methods other than `forward` that run a block, by the block's name.

    Returns:
        What takes the hooks off again and makes the glue.

    Raises:
        ValueError: if `methods` names something that is not a block.
    """
    methods = dict(methods or {})
    unknown = sorted(set(methods) - set(blocks.names))
    if unknown:
        raise ValueError(
            f"`forward_methods()` names {', '.join(map(repr, unknown))}, which is no block. Blocks: "
            f"{', '.join(map(repr, blocks.names))}."
        )
    removes: list[Remove] = []
    for name, modules, place in zip(blocks.names, blocks.modules, places, strict=True):
        door = Door(name, place, locator)
        for module in modules:
            removes += hook_block(door, module)
            removes += [hook_method(door, module, method) for method in methods.get(name, ())]
    return Installed(root, locator, removes)
