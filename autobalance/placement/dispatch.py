"""Place a plain module by a plan, for PyTorch or Fabric without the Trainer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.partitioning.plan import Plan
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator, Place
from autobalance.placement.move import Mover
from autobalance.placement.place import place

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def dispatch(model: AnyModule, plan: Plan, devices: Sequence[torch.device | str | int] | None = None) -> AnyModule:
    """Place `model` by `plan` and hook it, so that calling it runs every block on its device.

    Example:
        >>> model = autobalance.dispatch(model, plan)                      # doctest: +SKIP
        >>> model = autobalance.dispatch(model, plan, devices=["cuda:0"] * 4)  # four stages on one GPU  # doctest: +SKIP

    Args:
        model: the module the plan was made for; changed in place.
        plan: device index per block.
        devices: the torch device of each device of the plan; may repeat. Default: the simulated devices if there are any,
            else the GPUs in order.

    Returns:
        `model`. Its inputs are moved in, its output is where the last block left it.

    Raises:
        ValueError: if the plan is for other blocks, or needs more devices than there are.
    """
    blocks = find_blocks(model).ordered(plan.block_names)
    targets = _torch_devices(plan, devices)
    root_device = targets[plan.root]
    places = [targets[index] for index in plan.assignment]
    loose = {name: targets[index] for name, index in plan.device_map.items() if name not in blocks.names}
    place(model, blocks, places, loose, root_device)
    declared = getattr(model, "forward_methods", None)
    installed = install(model, blocks, places, DeviceLocator(targets), declared() if callable(declared) else None)
    entry = _Entry(installed, _EntryLocator(targets), root_device)
    model.register_forward_pre_hook(partial(_enter_model, entry), prepend=True, with_kwargs=True)
    model.register_forward_hook(partial(_leave_model, entry), with_kwargs=True, always_call=True)
    return model


def _torch_devices(plan: Plan, devices: Sequence[torch.device | str | int] | None) -> list[torch.device]:
    needed = len(plan.devices)
    if devices is None:
        kind = "simulated" if getattr(torch, "simulated", None) is not None else "cuda"
        there = torch.get_device_module(kind).device_count()
        if there < needed:
            raise ValueError(
                f"the plan is for {needed} devices, but this machine has {there} {kind} device(s). Pass `devices=`, one "
                f'torch device per device of the plan (they may repeat: `devices=["{kind}:0"] * {needed}`), or plan again.'
            )
        return [torch.device(kind, index) for index in range(needed)]
    if len(devices) != needed:
        raise ValueError(
            f"`devices` has {len(devices)} entries, but the plan is for {needed} devices: give one torch device for each."
        )
    return [torch.device(device) for device in devices]


class _EntryLocator(DeviceLocator):
    """Moves inputs from anywhere, the host too."""

    def place_of(self, tensor: Tensor) -> Place | None:
        return tensor.device


class _Entry:
    """What the hooks of the root need; glue is entered per call and thread."""

    def __init__(self, installed: Installed, locator: DeviceLocator, device: torch.device) -> None:
        self.installed = installed
        self.locator = locator
        self.device = device
        self._calls = threading.local()

    @property
    def stack(self) -> list[ExitStack]:
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        stack: list[ExitStack] = self._calls.stack
        return stack

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entry, (self.installed, self.locator, self.device)


def _enter_model(entry: _Entry, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    stack = ExitStack()
    entry.stack.append(stack)
    moved: tuple[Any, Any] = Mover(entry.locator, entry.device).move((args, kwargs))
    stack.enter_context(entry.installed.glue())
    return moved


def _leave_model(entry: _Entry, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    entry.stack.pop().close()
    return output
