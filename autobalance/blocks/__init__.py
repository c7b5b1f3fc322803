"""Which modules of a model are placed as one, in what groups, and which of them must stay together."""

from autobalance.blocks.blocks import Block, Blocks
from autobalance.blocks.find import find_blocks

__all__ = ["Block", "Blocks", "find_blocks"]
