"""Private base classes of torch's normalisations."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` normalises over the samples of a batch: any of torch's, or a class built on them.

    Args:
        module: of any class.
    """
    return isinstance(module, _BatchNorm)


def is_instance_norm(module: nn.Module) -> bool:
    """Whether `module` normalises each sample by itself but may keep running statistics of the batch.

    Args:
        module: of any class.
    """
    return isinstance(module, _InstanceNorm)
