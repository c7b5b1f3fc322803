"""The blocks of a model: those it declares, or those found in it."""

from __future__ import annotations

from torch import nn

from autobalance.blocks.blocks import Blocks
from autobalance.blocks.declared import declared_groups
from autobalance.blocks.discovery import discovered_groups


def find_blocks(root: nn.Module) -> Blocks:
    """Find the blocks of `root`: those its own `self_balance()` returns, else parts that repeat and those around them.

    Example:
        >>> find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))).names
        ('0+1', '2')

    Args:
        root: the model, of any class. A method `self_balance` that returns None counts as none.

    Returns:
        Disjoint blocks, in the order declared or registered.

    Raises:
        TypeError: if `self_balance()` returns something that is neither a module nor a name.
        ValueError: if it names a module that is unknown, foreign, repeated or inside another entry; if none is found.
    """
    groups = declared_groups(root)
    return Blocks.of(root, discovered_groups(root) if groups is None else groups)
