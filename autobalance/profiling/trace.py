"""Trace a trial on a copy of the model: with every block in a place of its own, to plan; as placed, to forecast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.blocks import Blocks
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator, Locator, Place
from autobalance.placement.place import loose_tensors
from autobalance.profiling.copying import copy_module
from autobalance.profiling.sandbox import random_state_kept
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.trial import Batch, Trial
from autobalance.profiling.virtual import VirtualLocator
from autobalance.profiling.work import WorkCounter
from autobalance.profiling.world import Kind, World, make_world

ROOT_ACCOUNT = -1


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
    homes: dict[int | None, int] = field(default_factory=dict)


def trace_apart(
    root: nn.Module,
    blocks: Blocks,
    trial: Trial,
    batches: Sequence[Batch],
    device_type: str,
    kind: Kind = "fake",
    last: int | None = None,
) -> Traced:
    """Trace with every block in a place of its own, all on one device.

    Args:
        root: the user's model; not touched.
        blocks: its blocks.
        trial: runs the steps.
        batches: one of every loader the run will meet, training first.
        device_type: of the devices that the run will use.
        kind: "fake" elements need no memory; "real" ones are a copy of the model on the CPU.
        last: the block that is called last, whose output goes to the loss; None: as declared, and found out if it is not.

    Returns:
        The trace. Accounts: block index; number of blocks plus index for loose tensors; ROOT_ACCOUNT.
    """
    count = len(blocks)
    loose = {name: count + index for index, name in enumerate(loose_tensors(root, blocks))}
    traced = Traced(Tracer(), count, loose=loose)
    world = _make_world(traced, kind, device_type, 1)
    traced.locator = VirtualLocator(traced.tracer, world)
    homes = _homes(root, blocks, range(count), loose)
    with world:
        layout = _Layout(
            places=range(count),
            exit=(count - 1 if last is None else last, ROOT_ACCOUNT),
            locator=traced.locator,
            root_device=world.devices[0],
            spot_of=lambda tensor: (0, homes.get(id(tensor), ROOT_ACCOUNT)),
        )
        with world.charging(ROOT_ACCOUNT):
            _run(root, blocks, trial, batches, kind, layout, world, traced)
    called_last = traced.order[-1] if traced.order else count - 1
    if last is None and called_last != count - 1:
        return trace_apart(root, blocks, trial, batches, device_type, kind, called_last)
    return traced


def trace_placed(
    root: nn.Module,
    blocks: Blocks,
    trial: Trial,
    batches: Sequence[Batch],
    placement: Placement,
    device_type: str,
    kind: Kind = "fake",
) -> Traced:
    """Trace with a placement installed, on as many devices as it has.

    Args:
        root: the user's model; not touched.
        blocks: its blocks.
        trial: runs the steps.
        batches: one of every loader the run will meet, training first.
        placement: where everything is.
        device_type: of the devices that the run will use.
        kind: "fake" elements need no memory; "real" ones are a copy of the model on the CPU.

    Returns:
        The trace; accounts are device indices.
    """
    traced = Traced(Tracer(), len(blocks))
    world = _make_world(traced, kind, device_type, placement.devices)
    homes = _homes(root, blocks, placement.assignment, placement.loose)
    with world:
        # Where all devices are one, copies are made between accounts instead.
        apart = len(world.devices) == placement.devices
        places = [world.devices[index] for index in placement.assignment] if apart else placement.assignment
        layout = _Layout(
            places=places,
            exit=(len(blocks) - 1, world.devices[placement.root] if apart else placement.root),
            locator=DeviceLocator(world.devices) if apart else VirtualLocator(traced.tracer, world),
            root_device=world.devices[placement.root if apart else 0],
            spot_of=lambda tensor: _spot(homes.get(id(tensor), placement.root), apart),
        )
        with world.charging(None if apart else placement.root):
            _run(root, blocks, trial, batches, kind, layout, world, traced)
    return traced


def _spot(account: int, apart: bool) -> tuple[int, int]:
    return (account if apart else 0), account


@dataclass(frozen=True)
class Placement:
    """Where everything is.

    Attributes:
        assignment: device index per block.
        loose: device index by the qualified name of a tensor outside every block; others are on the root device.
        root: device index of batch and loss.
        devices: how many there are.
    """

    assignment: Sequence[int]
    loose: Mapping[str, int]
    root: int
    devices: int


@dataclass(frozen=True)
class _Layout:
    """Where everything is in a trace; `exit` is (index of the last block, place of the loss), `spot_of` gives (device
    index, account) of one of the model's tensors."""

    places: Sequence[Place]
    exit: tuple[int, Place]
    locator: Locator
    root_device: torch.device
    spot_of: Callable[[Tensor], tuple[int, int]]


def _homes(root: nn.Module, blocks: Blocks, of_block: Sequence[int], of_loose: Mapping[str, int]) -> dict[int, int]:
    """Account by the id of each of the model's registered tensors."""
    homes = {id(tensor): of_loose[name] for name, tensor in loose_tensors(root, blocks).items() if name in of_loose}
    for account, modules in zip(of_block, blocks.modules, strict=True):
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                homes.setdefault(id(tensor), account)
    return homes


def _make_world(traced: Traced, kind: Kind, device_type: str, devices: int) -> World:
    observer = _Observer(traced)
    world = make_world(kind, device_type, devices, traced.tracer, traced.placeholders.append, observer)
    observer.world = world
    return world


def _run(
    root: nn.Module,
    blocks: Blocks,
    trial: Trial,
    batches: Sequence[Batch],
    kind: Kind,
    layout: _Layout,
    world: World,
    traced: Traced,
) -> None:
    with random_state_kept():
        twin, traced.shared = copy_module(root, _replacing(root, world, layout), trial.stand_ins(root, kind))
        twin_blocks = _blocks_of(twin, root, blocks)
        _describe_static(twin, traced)
        declared = getattr(twin, "forward_methods", None)
        methods = declared() if callable(declared) else None
        installed = install(twin, twin_blocks, layout.places, layout.locator, methods, layout.exit)
        _watch_calls(twin_blocks, traced)
        optimizers = trial.prepare(twin, layout.root_device)
        traced.optimizers = tuple(type(optimizer).__name__ for optimizer in optimizers)
        mark = partial(_mark, traced.tracer, twin, optimizers)
        for batch in batches:
            trial.run(twin, batch, installed.glue, mark)
        _mark(traced.tracer, twin, optimizers, "end")


def _replacing(root: nn.Module, world: World, layout: _Layout) -> Callable[[Tensor], Tensor]:
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}

    def replace(tensor: Tensor) -> Tensor:
        if id(tensor) not in registered and tensor.device.type in ("cpu", "meta"):
            return world.on_host(tensor)  # a plain attribute stays on the host, as `module.to` leaves it there
        return world.on_device(tensor, *layout.spot_of(tensor))

    return replace


def _blocks_of(twin: nn.Module, root: nn.Module, blocks: Blocks) -> Blocks:
    """The same blocks in the copy."""
    names = {id(module): name for name, module in root.named_modules()}
    modules = tuple(tuple(twin.get_submodule(names[id(part)]) for part in group) for group in blocks.modules)
    return Blocks(blocks.names, modules)


def _describe_static(twin: nn.Module, traced: Traced) -> None:
    tracer = traced.tracer
    for kind, tensors in (("buffers", twin.buffers()), ("weights", twin.parameters())):
        for tensor in tensors:
            index = tracer.find(tensor.untyped_storage())
            if index is not None:
                tracer.kinds[index] = kind
                traced.homes[index] = tracer.accounts[index]


class _Observer:
    """Sees every operation: counts its work, and notes a block that uses another's parameter without being given it."""

    world: World

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        traced = self._traced
        traced.work(func, args, kwargs, result, account)
        locator, inside = traced.locator, self.world.current_account
        if locator is None or inside is None or inside == ROOT_ACCOUNT or compat.in_backward():
            return
        for tensor in _tensors(args):
            home = traced.homes.get(traced.tracer.find(tensor.untyped_storage()), inside)
            if home == inside:
                continue
            if home < traced.count:
                traced.foreign.add((inside, home))
            else:
                locator.exchanges.setdefault((home, inside))


def _mark(tracer: Tracer, twin: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
    """Name the moment, and say which of the live storages are gradients and optimizer state by now."""
    for parameter in twin.parameters():
        if parameter.grad is not None:
            tracer.describe(parameter.grad.untyped_storage(), "gradients")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for tensor in _tensors(list(state.values())):
                tracer.describe(tensor.untyped_storage(), "optimizer")
    tracer.mark(name)


def _watch_calls(blocks: Blocks, traced: Traced) -> None:
    """Note the order of first calls and the bytes of outputs."""

    def called(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if index not in traced.outputs:
            traced.order.append(index)
        storages = {compat.storage_key(tensor.untyped_storage()): tensor for tensor in _tensors(output)}
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        traced.outputs[index] = max(traced.outputs.get(index, 0), nbytes)

    for index, modules in enumerate(blocks.modules):
        for module in modules:
            module.register_forward_hook(partial(called, index))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
