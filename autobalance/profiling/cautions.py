"""How far a trace can be trusted, in words for the reader of a profile."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from autobalance import compat
from autobalance.kernels.target import Target


def cautions(root: nn.Module, target: Target) -> Iterator[str]:
    """What the tables of kernels do not know about this model or this target.

    Args:
        root: the user's model.
        target: whose kernels are counted.
    """
    if target.kind == "hip":
        yield (
            f"not checked: {target.name} takes the tables of kernels that were read from torch's sources for AMD GPUs, "
            f"which nobody has measured; pass measure=, such as measure='cuda:0', to run every block on the GPU itself"
        )
    compiled = [name or type(root).__name__ for name, module in root.named_modules() if compat.is_compiled(module)]
    if compiled:
        shown = ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")
        yield (
            f"not checked: compiled ({shown}). What torch.compile makes of a block is not traced; it was counted as it "
            f"is written, which usually takes more memory"
        )
