"""Trace a trial on a copy of the model: once with every block in a place of its own, to plan; once as placed, to forecast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.blocks import Blocks
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator, Locator, Place
from autobalance.placement.place import loose_tensors
from autobalance.profiling.copying import copy_module
from autobalance.profiling.elements import Elements
from autobalance.profiling.sandbox import random_state_kept
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.trial import Batch, Trial
from autobalance.profiling.virtual import VirtualLocator
from autobalance.profiling.work import WorkCounter
from autobalance.simulated import backend, dispatch
from autobalance.simulated.configure import simulate
from autobalance.simulated.dispatch import charging, observing
from autobalance.simulated.ledger import using_ledger
from autobalance.simulated.tensor import SimulatedTensor

ROOT_ACCOUNT = -1
DEVICE = "simulated"


@dataclass
class Traced:
    """What a trace leaves behind.

    Attributes:
        tracer: storages and events.
        count: number of blocks.
        order: block indices in the order of their first call.
        outputs: bytes that each block's forward returned, by block index.
        work: what each account computed.
        loose: account by the qualified name of a tensor outside every block.
        locator: who exchanged what; None in a trace as placed.
        shared: attributes that could not be copied.
        placeholders: what kinds of scalar were asked for that only real elements know.
        optimizers: class names of the optimizers.
        foreign: pairs (block, block whose parameter it uses without being given it).
        homes: account by storage of the model's registered tensors.
    """

    tracer: Tracer
    count: int
    order: list[int] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)
    work: WorkCounter = field(default_factory=WorkCounter)
    loose: dict[str, int] = field(default_factory=dict)
    locator: VirtualLocator | None = None
    shared: list[str] = field(default_factory=list)
    placeholders: list[str] = field(default_factory=list)
    optimizers: tuple[str, ...] = ()
    foreign: set[tuple[int, int]] = field(default_factory=set)
    homes: dict[int, int] = field(default_factory=dict)


def trace_apart(
    root: nn.Module, blocks: Blocks, trial: Trial, batches: Sequence[Batch], kind: Literal["fake", "real"] = "fake"
) -> Traced:
    """Trace with every block in a place of its own, all on one simulated device.

    Args:
        root: the user's model; not touched.
        blocks: its blocks.
        trial: runs the steps.
        batches: one of every loader the run will meet, training first.
        kind: "fake" elements need no memory; "real" ones are a copy of the model on the CPU.

    Returns:
        The trace. Accounts: block index; number of blocks plus index for loose tensors; ROOT_ACCOUNT.
    """
    tracer = Tracer()
    count = len(blocks.names)
    loose = {name: count + index for index, name in enumerate(loose_tensors(root, blocks))}
    traced = Traced(tracer, count, loose=loose, locator=VirtualLocator(tracer))
    home = {id(tensor): loose[name] for name, tensor in loose_tensors(root, blocks).items()}
    for index, modules in enumerate(blocks.modules):
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                home.setdefault(id(tensor), index)
    assert traced.locator is not None
    layout = _Layout(
        places=list(range(count)),
        locator=traced.locator,
        root_device=torch.device(DEVICE, 0),
        spot_of=lambda tensor: (0, home.get(id(tensor), ROOT_ACCOUNT)),
        devices=1,
    )
    with charging(ROOT_ACCOUNT):
        _run(root, blocks, trial, batches, kind, layout, traced)
    return traced


def trace_placed(
    root: nn.Module,
    blocks: Blocks,
    trial: Trial,
    batches: Sequence[Batch],
    assignment: Sequence[int],
    loose: Mapping[str, int],
    root_device: int,
    devices: int,
    kind: Literal["fake", "real"] = "fake",
) -> Traced:
    """Trace with a placement installed, on as many simulated devices as it has.

    Args:
        root: the user's model; not touched.
        blocks: its blocks.
        trial: runs the steps.
        batches: one of every loader the run will meet, training first.
        assignment: device index per block.
        loose: device index by the qualified name of a tensor outside every block; others are on the root device.
        root_device: device index of batch and loss.
        devices: how many there are.
        kind: "fake" elements need no memory; "real" ones are a copy of the model on the CPU.

    Returns:
        The trace; accounts are device indices.
    """
    home = {id(tensor): loose.get(name, root_device) for name, tensor in loose_tensors(root, blocks).items()}
    for index, modules in enumerate(blocks.modules):
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                home.setdefault(id(tensor), assignment[index])
    there = [torch.device(DEVICE, index) for index in range(devices)]

    def spot_of(tensor: Tensor) -> tuple[int, int]:
        device = home.get(id(tensor), root_device)
        return device, device

    layout = _Layout(
        places=[there[index] for index in assignment],
        locator=DeviceLocator(there),
        root_device=there[root_device],
        spot_of=spot_of,
        devices=devices,
    )
    traced = Traced(Tracer(), len(blocks))
    _run(root, blocks, trial, batches, kind, layout, traced)
    return traced


@dataclass
class _Layout:
    """Where everything is in a trace; `spot_of` gives (device index, account) of one of the model's tensors."""

    places: Sequence[Place]
    locator: Locator
    root_device: torch.device
    spot_of: Callable[[Tensor], tuple[int, int]]
    devices: int


def _run(
    root: nn.Module,
    blocks: Blocks,
    trial: Trial,
    batches: Sequence[Batch],
    kind: Literal["fake", "real"],
    layout: _Layout,
    traced: Traced,
) -> None:
    elements = Elements(kind, traced.placeholders.append)
    with ExitStack() as stack:
        for context in (
            _enough_devices(layout.devices),
            random_state_kept(),
            using_ledger(traced.tracer),
            elements,
            observing(_Observer(traced)),
        ):
            stack.enter_context(context)
        twin, traced.shared = copy_module(root, _replacing(root, elements, layout), trial.stand_ins(root, kind))
        twin_blocks = _blocks_of(twin, root, blocks)
        _describe_static(twin, traced)
        declared = getattr(twin, "forward_methods", None)
        methods = declared() if callable(declared) else None
        installed = install(twin, twin_blocks, layout.places, layout.locator, methods)
        _watch_calls(twin_blocks, traced)
        optimizers = trial.prepare(twin, layout.root_device)
        traced.optimizers = tuple(type(optimizer).__name__ for optimizer in optimizers)
        mark = partial(_mark, traced.tracer, twin, optimizers)
        for batch in batches:
            trial.run(twin, batch, installed.glue, mark)
        _mark(traced.tracer, twin, optimizers, "end")


def _enough_devices(count: int) -> AbstractContextManager[Any]:
    """Simulated devices for a trial; those that are there stay as they are."""
    return nullcontext() if backend.device_count() >= count else simulate(count)


def _replacing(root: nn.Module, elements: Elements, layout: _Layout) -> Callable[[Tensor], Tensor]:
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}

    def replace(tensor: Tensor) -> Tensor:
        if id(tensor) not in registered and tensor.device.type in ("cpu", "meta"):
            return elements.on_host(tensor)  # a plain attribute stays on the host, as `module.to` leaves it there
        index, account = layout.spot_of(tensor)
        return elements.on_device(tensor, index, account)

    return replace


def _blocks_of(twin: nn.Module, root: nn.Module, blocks: Blocks) -> Blocks:
    """The same blocks in the copy."""
    names = {id(module): name for name, module in root.named_modules()}
    modules = tuple(tuple(twin.get_submodule(names[id(part)]) for part in group) for group in blocks.modules)
    return Blocks(blocks.names, modules)


def _describe_static(twin: nn.Module, traced: Traced) -> None:
    for kind, tensors in (("buffers", twin.buffers()), ("weights", twin.parameters())):
        for tensor in tensors:
            if isinstance(tensor, SimulatedTensor):
                storage = tensor.untyped_storage()
                traced.tracer.describe(storage, kind)
                traced.homes[compat.storage_key(storage)] = tensor.account


class _Observer:
    """Sees every operation: counts its work, and notes a block that uses another's parameter without being given it."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        self._traced.work(func, args, kwargs, result, account)
        locator, inside = self._traced.locator, dispatch.current_account
        if locator is None or inside is None or inside == ROOT_ACCOUNT or compat.in_backward():
            return
        for tensor in _simulated(args):
            home = self._traced.homes.get(compat.storage_key(tensor.untyped_storage()), inside)
            if home == inside:
                continue
            if home < self._traced.count:
                self._traced.foreign.add((inside, home))
            else:
                locator.exchanges.setdefault((home, inside))


def _mark(tracer: Tracer, twin: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
    """Name the moment, and say which of the live storages are gradients and optimizer state by now."""
    for parameter in twin.parameters():
        if isinstance(parameter.grad, SimulatedTensor):
            tracer.describe(parameter.grad.untyped_storage(), "gradients")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, SimulatedTensor):
                    tracer.describe(value.untyped_storage(), "optimizer")
    tracer.mark(name)


def _watch_calls(blocks: Blocks, traced: Traced) -> None:
    """Note the order of first calls and the bytes of outputs."""

    def called(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if index not in traced.outputs:
            traced.order.append(index)
        storages = {}
        for tensor in _simulated(output):
            storages[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        traced.outputs[index] = max(traced.outputs.get(index, 0), sum(storages.values()))

    for index, modules in enumerate(blocks.modules):
        for module in modules:
            module.register_forward_hook(partial(called, index))


def _simulated(output: Any) -> list[SimulatedTensor]:
    if isinstance(output, SimulatedTensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in _simulated(item)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in _simulated(item)]
    return []

