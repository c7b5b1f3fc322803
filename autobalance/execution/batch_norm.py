"""Batch norm in a batch that is split: each part normalises by itself, the running statistics are the batch's.

The deferred batch norm of torchgpipe (Kim et al., arXiv 2004.09910, section 3), without classes of its own: modules
stay what they are, and so do checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autobalance.compat import buffer_table, in_backward, is_batch_norm
from autobalance.execution.micro_batch import current_micro_batch

Remove = Callable[[], None]

FEWEST_SAMPLES = 2
"""Samples that each part of a batch needs: one alone may have no variance, and batch norm raises then."""

_TRACKED = ("running_mean", "running_var", "num_batches_tracked")


class DeferredBatchNorm:
    """Collects the statistics of a step's parts; `end_step` updates the running ones once, as of the full batch.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> deferred = install_deferred(model)
        >>> for index, part in enumerate(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).split(2)):
        ...     with working_on(MicroBatch(index, count=2)):
        ...         _ = model(part)
        >>> deferred.end_step()
        >>> model[0].running_mean
        tensor([0.4000, 0.5000])
        >>> deferred.remove()

    Args:
        layers: the batch norms.
        removes: takes the hooks off.
    """

    def __init__(self, layers: list[_Layer], removes: list[Remove]) -> None:
        self._layers = layers
        self._removes = removes

    @property
    def has_any(self) -> bool:
        """Whether the model has batch norms."""
        return bool(self._layers)

    def end_step(self) -> None:
        """Update running mean, running variance and the number of batches of each layer that has run in training."""
        for layer in self._layers:
            layer.update()

    def forget(self) -> None:
        """Drop what a step that failed has collected."""
        for layer in self._layers:
            layer.calls.clear()

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
        while self._removes:
            self._removes.pop()()


def install_deferred(root: nn.Module) -> DeferredBatchNorm:
    """Let the batch norms of a model take the full batch's running statistics when its parts go through one by one.

    The gradients are those of normalising each part with its own statistics: not those of the full batch. Outside of
    batches that are split, nothing is deferred.

    Args:
        root: the model.

    Returns:
        What ends a step and takes the hooks off.

    Raises:
        ValueError: if there is a `SyncBatchNorm`, whose statistics are also those of other processes.
    """
    layers: list[_Layer] = []
    removes: list[Remove] = []
    for name, module in root.named_modules():
        if not is_batch_norm(module):
            continue
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"`batch_norm='deferred'` cannot be used with the SyncBatchNorm {name!r}. All devices are in one "
                f"process here, and its batch is whole: make it a BatchNorm2d, or use `batch_norm='fallback'`."
            )
        if all(isinstance(getattr(module, buffer, None), Tensor) for buffer in _TRACKED):
            layer = _Layer(module)
            layers.append(layer)
            # Innermost on the way in, and called on errors too: nobody else sees the module without its statistics.
            before = module.register_forward_pre_hook(layer.begin)
            after = module.register_forward_hook(layer.end, prepend=True, always_call=True)
            removes += [before.remove, after.remove]
    return DeferredBatchNorm(layers, removes)


class _Statistics(NamedTuple):
    """Of one call on one part: number of values per channel, their mean and unbiased variance."""

    values: int
    mean: Tensor
    variance: Tensor


@dataclass
class _Own:
    """What a module has of its own while a call runs on stand-ins."""

    buffers: dict[str, Any]
    momentum: float | None
    values: int


class _Layer:
    """One batch norm, and the statistics of its calls in this step, by their number within a part."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._own: _Own | None = None
        self.calls: dict[tuple[int, int], _Statistics] = {}

    def begin(self, module: nn.Module, args: Any) -> None:
        """Give torch stand-ins to write this call's statistics to: with a momentum of 1 it leaves nothing else."""
        if not module.training or not self._module.track_running_stats or not args or not self._defers():
            return
        buffers = {name: buffer_table(module)[name] for name in _TRACKED}
        self._own = _Own(buffers, self._module.momentum, args[0].numel() // max(1, args[0].shape[1]))
        for name, buffer in buffers.items():
            assert buffer is not None
            buffer_table(module)[name] = torch.zeros_like(buffer)
        self._module.momentum = 1.0

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the module's own buffers back and keep the statistics."""
        own, self._own = self._own, None
        if own is None:
            return
        mean, variance = buffer_table(module)["running_mean"], buffer_table(module)["running_var"]
        buffer_table(module).update(own.buffers)
        self._module.momentum = own.momentum
        current = current_micro_batch()
        if output is None or current is None or in_backward():  # failed, or run again by a recomputation
            return
        assert mean is not None
        assert variance is not None
        number = sum(1 for index, _ in self.calls if index == current.index)
        self.calls[current.index, number] = _Statistics(own.values, mean, variance)

    def _defers(self) -> bool:
        if in_backward():  # whose threads know of no micro-batch
            return bool(self.calls)
        current = current_micro_batch()
        return current is not None and current.count > 1

    @torch.no_grad()
    def update(self) -> None:
        """Once for each time that a part has been through, as the full batch would have been."""
        numbers = sorted({number for _, number in self.calls})
        for number in numbers:
            self._update([self.calls[key] for key in sorted(self.calls) if key[1] == number])
        self.calls.clear()

    def _update(self, parts: list[_Statistics]) -> None:
        module = self._module
        mean, variance = _pooled(parts)
        module.num_batches_tracked.add_(1)
        weight = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        module.running_mean.mul_(1 - weight).add_(mean.to(module.running_mean), alpha=weight)
        module.running_var.mul_(1 - weight).add_(variance.to(module.running_var), alpha=weight)


def _pooled(parts: list[_Statistics]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of all values, from those of each part (Chan, Golub and LeVeque, 1983)."""
    count = sum(part.values for part in parts)
    where = parts[0].mean
    kind = torch.promote_types(where.dtype, torch.float32)
    means = [part.mean.to(device=where.device, dtype=kind) for part in parts]
    variances = [part.variance.to(device=where.device, dtype=kind) for part in parts]
    mean = sum((part.values / count) * value for part, value in zip(parts, means, strict=True))
    assert isinstance(mean, Tensor)
    squares = [
        (part.values - 1) * variance + part.values * (value - mean) ** 2
        for part, value, variance in zip(parts, means, variances, strict=True)
    ]
    return mean, torch.stack(squares).sum(0) / max(1, count - 1)


@contextmanager
def deferring(norms: DeferredBatchNorm | None) -> Iterator[None]:
    """A step that is split: at its end running statistics are updated, and not at all if it fails.

    Args:
        norms: those of the model; None if nothing is deferred.
    """
    try:
        yield
    except BaseException:
        if norms is not None:
            norms.forget()
        raise
    if norms is not None:
        norms.end_step()
