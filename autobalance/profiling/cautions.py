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


def cautions_of_mode(root: nn.Module, training: bool) -> Iterator[str]:
    """That the model is in the mode for the other kind of run, where that makes a difference.

    Args:
        root: the user's model, which is profiled in the mode it is in.
        training: whether the run trains.
    """
    differ = {type(module).__name__: None for module in root.modules() if _differs(module, not training)}
    if root.training == training or not differ:
        return
    names = ", ".join(list(differ)[:3])
    if training:
        yield (
            f"the model is in evaluation mode, where {names} take less memory, and was profiled in it: call "
            f"model.train() before, if the run trains it in training mode"
        )
    else:
        yield (
            f"the model is in training mode, where {names} take more memory, and was profiled in it: call "
            f"model.eval() before, if the run evaluates it"
        )


def _differs(module: nn.Module, mode: bool) -> bool:
    is_dropout = isinstance(module, _DROPOUT) and module.p > 0
    return module.training == mode and (is_dropout or isinstance(module, _NORMS))


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
