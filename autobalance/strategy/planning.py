"""From the user's data to a plan, and from the plan to a placed model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autobalance.blocks import find_blocks
from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.place import place as place_tensors
from autobalance.profiling.profile import BlockCost
from autobalance.strategy.loaders import elements_in, sample_batches
from autobalance.strategy.options import Options


@dataclass
class Placed:
    """A model under a plan.

    Attributes:
        module: the model, held weakly.
        plan: where everything is.
        training: whether the plan covers training.
        elements: elements of the largest batch that the plan covers.
    """

    module: weakref.ref[nn.Module]
    plan: Plan
    training: bool
    elements: int
    _installed: Installed | None = None
    _buffers: list[tuple[nn.Module, str, torch.device]] = field(default_factory=list)
    _has_warned: bool = False

    def covers(self, module: nn.Module, training: bool, elements: int) -> bool:
        """Whether a run of `module` needs no other plan."""
        return self.module() is module and (self.training or not training) and elements <= self.elements

    def glue(self) -> AbstractContextManager[None]:
        """A context in which the user's operations outside blocks run where their operands are."""
        assert self._installed is not None
        return self._installed.glue()

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
        if self._installed is not None:
            self._installed.remove()
        self._installed, self._buffers = None, []

    def send_buffers_home(self) -> None:
        """Move buffers that were made anew elsewhere back to their module's device."""
        for module, name, device in self._buffers:
            buffer = getattr(module, name, None)
            if isinstance(buffer, torch.Tensor) and buffer.device != device:
                setattr(module, name, buffer.to(device))

    def check_batch(self, batch: Any) -> None:
        """Warn, once, about a batch that is larger than those the plan was made for."""
        if self._has_warned or (elements := elements_in(batch)) <= self.elements:
            return
        self._has_warned = True
        warnings.warn(
            f"This batch has {elements} elements, but the plan was made for batches of {self.elements} (plan.batch: "
            f"{self.plan.batch or 'unknown'}): it may need more memory than planned. Give the largest batch, or "
            f"SelfBalanceStrategy(worst_batch='scan:200').",
            stacklevel=2,
        )


def read_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The user's own plan, given or on disk."""
    return Plan.load(plan) if isinstance(plan, (str, Path)) else plan


def plan_run(
    trainer: Any, options: Options, devices: Sequence[torch.device], given: Plan | None, before: Placed | None
) -> Placed:
    """The plan of the Trainer's present run.

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
        options: how to plan.
        devices: the Trainer's devices.
        given: the user's own plan.
        before: what was placed in the last run; its plan is kept if it covers this one.

    Returns:
        The plan, with nothing placed.

    Raises:
        ValueError: if the user's plan is for another number of devices.
        InfeasiblePlanError: if no plan fits.
    """
    module = trainer.lightning_module
    training = trainer.state.fn == "fit"
    batches = sample_batches(trainer, options)
    elements = max((elements_in(batch.data) for batch in batches), default=0)
    if given is not None:
        if len(given.devices) != len(devices):
            raise ValueError(
                f"the plan is for {len(given.devices)} devices, but the Trainer has {len(devices)}: set "
                f"Trainer(devices={len(given.devices)}), or make a plan for {len(devices)}."
            )
        plan = given
    elif before is not None and before.covers(module, training, elements):
        return before
    else:
        plan = _even_plan(module, devices)
    return Placed(weakref.ref(module), plan, training, elements)


def place(placed: Placed, module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Move the model to its devices, block by block, and hook it.

    Args:
        placed: the plan; takes the hooks.
        module: the model.
        devices: the Trainer's devices.
    """
    plan = placed.plan
    placed.remove()
    blocks = find_blocks(module).ordered(plan.block_names)
    places = [devices[index] for index in plan.assignment]
    loose = {name: devices[index] for name, index in plan.device_map.items()}
    place_tensors(module, blocks, places, loose, devices[plan.root])
    methods = getattr(module, "forward_methods", None)
    placed._installed = install(
        module, blocks, places, DeviceLocator(devices), methods() if callable(methods) else None
    )
    placed._buffers = [
        (part, name, buffer.device) for part in module.modules() for name, buffer in part.named_buffers(recurse=False)
    ]


def _even_plan(module: nn.Module, devices: Sequence[torch.device]) -> Plan:
    blocks = find_blocks(module)
    count = len(blocks)
    assignment = [len(devices) - 1 - (count - 1 - index) * len(devices) // count for index in range(count)]
    for group in blocks.ties:
        for index in group:
            assignment[index] = assignment[group[-1]]
    rows = tuple(BlockCost(name, kind="+".join(type(m).__name__ for m in block)) for name, block in zip(blocks.names, blocks.modules, strict=True))
    return Plan(
        tuple(assignment), rows, tuple(Device(str(device), 0) for device in devices), (0,) * len(devices), (0,) * len(devices),
        root=assignment[-1], policy="even",
    )
