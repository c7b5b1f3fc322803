"""Place a plain module by a plan, for PyTorch or Fabric without the Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.execution.running import running_of
from autobalance.execution.savings.savings import homes_of, install_savings, pin_streamed
from autobalance.partitioning.agreement import refuse_other_devices, refuse_other_weights
from autobalance.partitioning.executable import refuse_micro_batches
from autobalance.partitioning.plan import Plan
from autobalance.placement.agreement import memory_of, weights_held
from autobalance.placement.hooks import Remove, replace_method, run_method
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator, Place, with_index
from autobalance.placement.move import Mover
from autobalance.placement.pairs import check_pairs
from autobalance.placement.place import place

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def dispatch(model: AnyModule, plan: Plan, devices: Sequence[torch.device | str | int] | None = None) -> AnyModule:
    """Place `model` by `plan` and hook it, so that calling it runs every block on its device.

    Example:
        >>> model = autobalance.dispatch(model, plan)                          # doctest: +SKIP
        >>> model = autobalance.dispatch(model, plan, devices=["cuda:0"] * 4)  # doctest: +SKIP

    Args:
        model: the module the plan was made for; changed in place. Dispatched again, it is placed anew.
        plan: device index per block.
        devices: the torch device of each device of the plan; may repeat, as for four stages on one GPU. Default: the
            simulated devices if there are any, else the GPUs in order.

    Returns:
        `model`. Its inputs are moved in, its output is where the last block left it. It can be copied and pickled.

    Raises:
        ValueError: if the plan is for other blocks, weights or devices than there are, or splits batches, which the
            Trainer's strategy can; nothing has moved then.
    """
    refuse_micro_batches(plan)
    targets = _torch_devices(plan, devices)
    blocks = find_blocks(model).ordered(plan.block_names)
    refuse_other_weights(plan, weights_held(model, blocks, plan))
    refuse_other_devices(plan, [(str(target), memory_of(target)) for target in targets])
    _refuse_meta(model)
    _release(model)
    root_device = targets[plan.root]
    places = [targets[index] for index in plan.assignment]
    loose = {name: targets[index] for name, index in plan.loose_map.items()}
    declared = getattr(model, "forward_methods", None)
    methods = dict(declared() or {}) if callable(declared) else {}
    of_model = () if "" in blocks.names else methods.pop("", ())
    locator = DeviceLocator(targets)
    running = running_of(plan)
    savings = install_savings(model, blocks, running, places, places, locator, methods)
    installed = install(model, blocks, places, locator, methods, exit=(len(blocks) - 1, targets[plan.root]))
    check_pairs((*places, root_device))
    place(model, blocks, homes_of(running, places), loose, root_device)
    pin_streamed(blocks, running, places)
    model.__dict__[_DISPATCHED] = _Dispatched(installed, savings, _EntryLocator(targets), root_device)
    model.__dict__[_DISPATCHED].hook(model, ("forward", *of_model))
    if plan.host_optimizer:
        _log.warning(_ON_HOST, ", ".join(map(str, plan.host_optimizer)), [str(targets[i]) for i in plan.host_optimizer])
    return model


_log = logging.getLogger("autobalance")
_ON_HOST = (
    "The plan keeps the optimizer state of device %s on the host. Once your optimizer is made, call "
    "autobalance.execution.savings.host_optimizer.on_host(optimizer, host_parameters(model, devices)) with the "
    "torch devices %s; without that the state is on the device, and needs more memory than planned."
)


_DISPATCHED = "_autobalance_dispatched"


class _EntryLocator(DeviceLocator):
    """Moves inputs from anywhere, the host too."""

    def place_of(self, tensor: Tensor) -> Place | None:
        return tensor.device


class _Dispatched:
    """What a dispatched model keeps: its hooks, and where its inputs go."""

    def __init__(
        self, installed: Installed, savings: list[Remove], locator: DeviceLocator, device: torch.device
    ) -> None:
        self.installed = installed
        self._savings = savings
        self._locator = locator
        self._device = device
        self._removes: list[Remove] = []

    def hook(self, model: nn.Module, methods: Sequence[str]) -> None:
        """Have methods of the model take their inputs from anywhere and run under the glue."""
        self._removes = [replace_method(model, name, partial(_call_model, self)) for name in methods]

    def remove(self) -> None:
        """Take all hooks off."""
        while self._removes:
            self._removes.pop()()
        self.installed.remove()
        while self._savings:
            self._savings.pop()()

    def call(self, model: nn.Module, name: str, inner: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """Run one method of the model."""
        mover = Mover(self._locator, self._device)
        args, kwargs = mover.move((args, kwargs))
        try:
            with self.installed.glue():
                output = run_method(model, name, inner, args, kwargs)
        finally:
            mover.carry_back()
        return mover.restore(output)


def _call_model(
    dispatched: _Dispatched, model: nn.Module, name: str, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    return dispatched.call(model, name, inner, args, kwargs)


def _release(model: nn.Module) -> None:
    """Take the hooks of an earlier dispatch off."""
    before = model.__dict__.pop(_DISPATCHED, None)
    if before is not None:
        before.remove()


def _torch_devices(plan: Plan, devices: Sequence[torch.device | str | int] | None) -> list[torch.device]:
    needed = len(plan.devices)
    if devices is None:
        kind = "simulated" if getattr(torch, "simulated", None) is not None else "cuda"
        there = torch.get_device_module(kind).device_count()
        if there < needed:
            raise ValueError(
                f"the plan is for {needed} devices, but this machine has {there} {kind} device(s). Plan again, or pass "
                f"`devices=`, a torch device for each device of the plan; they may repeat: ['{kind}:0'] * {needed}."
            )
        return [torch.device(kind, index) for index in range(needed)]
    if isinstance(devices, str) or len(devices) != needed:
        raise ValueError(
            f"`devices` is {devices!r}, but the plan is for {needed} devices: give a list of one torch device for each."
        )
    targets = [with_index(torch.device(device)) for device in devices]
    kinds = sorted({device.type for device in targets})
    if len(kinds) > 1:
        raise ValueError(f"`devices` mixes {' and '.join(kinds)}: a plan is for devices of one type.")
    for device in targets:
        if device.type != "cpu" and device.index >= (there := torch.get_device_module(device).device_count()):
            raise ValueError(f"`devices` names {str(device)!r}, but there are {there} {device.type} device(s).")
    return targets


def _refuse_meta(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if empty:
        raise ValueError(
            f"{len(empty)} tensors of the model are on the meta device and have no values, {empty[0]!r} the first. "
            f"Load or initialise them before dispatch."
        )
