"""Install the doors of all blocks on a model, and the glue between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from autobalance.blocks import Blocks
from autobalance.placement.glue import glue
from autobalance.placement.hooks import Door, Remove, Visitor, hook_block, hook_method, visits_ended
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

    def remove(self) -> None:
        """Take every hook off; may be called again."""
        while self._removes:
            self._removes.pop()()

    @contextmanager
    def glue(self) -> Iterator[None]:
        """A context in which the user's operations outside blocks run where their operands are."""
        if self._locator.nothing_moves:
            with visits_ended():
                yield
            return
        with glue(self._locator, self._root), visits_ended():
            yield


def install(
    root: nn.Module,
    blocks: Blocks,
    places: Sequence[Place],
    locator: Locator,
    methods: Mapping[str, Sequence[str]] | None = None,
    exit: tuple[int, Place] | None = None,
    visitor: Visitor | None = None,
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
        exit: index of the block whose output goes to the loss, and the place where the loss is to find it.
        methods: names of methods other than `forward` that run a block, by the name of the block or of a module in it.
        visitor: is told of visits of blocks.

    Returns:
        What takes the hooks off again and makes the glue.

    Raises:
        ValueError: if `methods` names something that is no block, or has no such method; nothing is hooked then.
    """
    called = methods_by_module(root, blocks, methods or {})
    removes: list[Remove] = []
    for index, (name, modules, place) in enumerate(zip(blocks.names, blocks.modules, places, strict=True)):
        way_out = exit[1] if exit is not None and exit[0] == index else None
        door = Door(name, place, locator, way_out, index, visitor)
        for module in modules:
            removes += hook_block(door, module)
            for method in called.get(id(module), ()):
                removes += hook_method(door, module, method)
    return Installed(root, locator, removes)


def methods_by_module(root: nn.Module, blocks: Blocks, methods: Mapping[str, Sequence[str]]) -> dict[int, list[str]]:
    """Names of the methods to hook by the id of the module that has them.

    Args:
        root: the model that holds the blocks.
        blocks: the blocks, in order.
        methods: names of methods, by the name of a block or of a module in it.

    Raises:
        ValueError: a name is no block's, or there is no such method.
    """
    names = {id(module): name for name, module in root.named_modules()}
    owners: dict[str, list[nn.Module]] = {
        name: list(modules) for name, modules in zip(blocks.names, blocks.modules, strict=True)
    }
    for modules in blocks.modules:
        for module in modules:
            owners.setdefault(names[id(module)], [module])
    found: dict[int, list[str]] = {}
    for name, wanted in methods.items():
        if name not in owners:
            raise ValueError(
                f"`forward_methods()` names {name!r}, which is no block. Blocks: {', '.join(map(repr, blocks.names))}."
            )
        if isinstance(wanted, str):
            raise ValueError(f"`forward_methods()` gives {wanted!r} for {name!r}: give a list of names, [{wanted!r}].")
        for method in wanted:
            having = [module for module in owners[name] if callable(getattr(module, method, None))]
            if not having:
                classes = " and ".join(sorted({type(module).__name__ for module in owners[name]}))
                raise ValueError(
                    f"`forward_methods()` names {method!r} for block {name!r}, but {classes} has no such method."
                )
            for module in having:
                found.setdefault(id(module), []).append(method)
    return found
