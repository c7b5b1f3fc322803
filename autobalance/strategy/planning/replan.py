"""Plan again while the model is on its devices: for a larger batch, or for less memory than was counted on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import data_owners, loader_attachment_kept, logged_tensors, storage_key
from autobalance.devices.device import Device
from autobalance.placement.contents import elements_in, tensors_in
from autobalance.profiling.trial import Batch
from autobalance.strategy.options import Options
from autobalance.strategy.placed import Placed
from autobalance.strategy.planning.best_plan import best_plan, planned_devices
from autobalance.strategy.planning.loaders import describe, sample_batches
from autobalance.strategy.planning.undisturbed import undisturbed
from autobalance.strategy.recovery.shortage import memory_allocated
from autobalance.strategy.trials.metrics import is_metric

_GRANULE = 512


@dataclass
class Learned:
    """What a run has shown of its needs, beyond what was known when it was first planned.

    Attributes:
        unforeseen: bytes by which each device was found to need more than planned, by its position.
        largest: the batch of each kind with the most elements that has led to another plan.
    """

    unforeseen: dict[int, int] = field(default_factory=dict)
    largest: dict[str, Batch] = field(default_factory=dict)

    def meet(self, kind: str, data: Any) -> None:
        """Plan for a batch as large as this from now on.

        Args:
            kind: "train", "validate", "test" or "predict".
            data: as the loader gives it.
        """
        known = self.largest.get(kind)
        if known is None or elements_in(known.data) < elements_in(data):
            self.largest[kind] = Batch(f"the largest {kind} batch so far ({describe(data)})", kind, data)


def plan_anew(
    trainer: Any, options: Options, devices: Sequence[torch.device], learned: Learned, in_use: Iterable[Tensor] = ()
) -> Placed:
    """Plan for what a run has shown, on what its devices can hold for it now.

    Args:
        trainer: a Trainer between two steps, its model without hooks.
        options: how to plan.
        devices: the Trainer's devices.
        learned: what the run has shown.
        in_use: tensors on the devices that plans count, beside those of the model and its optimizers: the batch.

    Returns:
        The plan, with nothing placed.

    Raises:
        InfeasiblePlanError: if no plan fits.
    """
    module = trainer.lightning_module
    with undisturbed(module, trainer.datamodule, *data_owners(trainer)), loader_attachment_kept(trainer):
        batches = tuple(_largest(sample_batches(trainer, options, again=True), learned))
        plan = best_plan(trainer, options, devices, batches, room(trainer, devices, learned, in_use))
    elements = max((elements_in(batch.data) for batch in batches), default=0)
    return Placed(weakref.ref(module), plan, trainer.state.fn == "fit", elements or None)


def _largest(samples: Sequence[Batch], learned: Learned) -> Iterator[Batch]:
    """The samples, or the batches of their kind that were found to be larger; training first."""
    kinds = {sample.kind for sample in samples}
    yield from (met for kind, met in learned.largest.items() if kind not in kinds and kind == "train")
    for sample in samples:
        met = learned.largest.get(sample.kind)
        is_larger = met is not None and elements_in(met.data) > elements_in(sample.data)
        yield replace(met, loader=sample.loader) if met is not None and is_larger else sample
    yield from (met for kind, met in learned.largest.items() if kind not in kinds and kind != "train")


def room(
    trainer: Any, devices: Sequence[torch.device], learned: Learned, in_use: Iterable[Tensor] = ()
) -> list[Device]:
    """What each device can hold for the run: what is free there, and what the run itself holds there now.

    Args:
        trainer: a Trainer between two steps.
        devices: the Trainer's devices.
        learned: what the run has shown.
        in_use: tensors on the devices that plans count, beside those of the model and its optimizers.
    """
    held = held_by_run(trainer, in_use)
    return [
        replace(target, capacity=max(0, target.capacity + held.get(device, 0) - learned.unforeseen.get(index, 0)))
        for index, (target, device) in enumerate(zip(planned_devices(devices), devices, strict=True))
    ]


def held_by_run(trainer: Any, in_use: Iterable[Tensor] = ()) -> dict[torch.device, int]:
    """Bytes of all that plans count, as it is now, by device.

    Args:
        trainer: a Trainer between two steps.
        in_use: tensors that plans count, beside those of the model and its optimizers.
    """
    return _bytes_on((*_own_tensors(trainer), *in_use))


def held_by_others(trainer: Any, devices: Sequence[torch.device], in_use: Iterable[Tensor] = ()) -> list[int]:
    """Bytes on each device that this process holds beside what plans count: they are not free for the run.

    Args:
        trainer: a Trainer between two steps.
        devices: the Trainer's devices.
        in_use: as for `held_by_run`.
    """
    own = held_by_run(trainer, in_use)
    return [max(0, memory_allocated(device) - own.get(device, 0)) for device in devices]


def _bytes_on(tensors: Iterable[Tensor]) -> dict[torch.device, int]:
    """Bytes of the storages of tensors by device, each rounded up as CUDA's allocator does."""
    seen: set[int] = set()
    held: dict[torch.device, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" and storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            nbytes = -(-storage.nbytes() // _GRANULE) * _GRANULE
            held[tensor.device] = held.get(tensor.device, 0) + nbytes
    return held


def _own_tensors(trainer: Any) -> Iterator[Tensor]:
    """All that a plan counts: weights, gradients, buffers, optimizer state, metrics and logged values."""
    module = trainer.lightning_module
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in trainer.optimizers:
        yield from tensors_in([state for state in optimizer.state.values() if isinstance(state, dict)], in_objects=True)
    for part in module.modules():
        if is_metric(part):
            yield from tensors_in(list(vars(part).values()), in_objects=True)
    yield from tensors_in(logged_tensors(trainer), in_objects=True)
