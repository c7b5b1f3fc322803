"""`Blocks`: the modules of a model that are placed as one, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from autobalance.blocks.ties import find_ties


@dataclass(frozen=True, eq=False)
class Block:
    """Modules that share one place."""

    #: Qualified name in the model; names of several modules are joined by "+". The model itself is "".
    name: str
    #: One module, or those of a group.
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a model: disjoint, in order.

    Example:
        >>> blocks = Blocks.of(model, [(model.embed,), (model.norm, model.head)])  # doctest: +SKIP
        >>> blocks.names                                                           # doctest: +SKIP
        ('embed', 'norm+head')

    Attributes:
        names: of the blocks, as `Block.name`.
        modules: of each block.
    """

    names: tuple[str, ...]
    modules: tuple[tuple[nn.Module, ...], ...]

    @classmethod
    def of(cls, root: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> Blocks:
        """Name the groups as `root` does; each must be made of modules inside `root`.

        Args:
            root: the model.
            groups: modules of each block, in order.
        """
        names = {id(module): name for name, module in root.named_modules()}
        return cls(
            tuple("+".join(names[id(module)] for module in group) for group in groups),
            tuple(tuple(group) for group in groups),
        )

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Block]:
        return map(Block, self.names, self.modules)

    @cached_property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """Groups of block indices that must be on one device, since they share a module, a parameter or memory."""
        return find_ties(self.modules)

    def ordered(self, names: Sequence[str]) -> Blocks:
        """The same blocks in another order.

        Args:
            names: every block's name, once, such as a plan has them.

        Raises:
            ValueError: if the names are not those of these blocks, each once.
        """
        if sorted(names) != sorted(self.names):
            differences = {
                "the plan lacks": [name for name in self.names if name not in names],
                "the model lacks": [name for name in names if name not in self.names],
                "the plan repeats": sorted({name for name in names if names.count(name) > 1}),
            }
            told = [f"{what} {', '.join(map(repr, which))}" for what, which in differences.items() if which]
            raise ValueError(
                f"the plan was made for other blocks than the model has: {'; '.join(told)}. Make a plan for this model."
            )
        index = {name: position for position, name in enumerate(self.names)}
        return Blocks(tuple(names), tuple(self.modules[index[name]] for name in names))
