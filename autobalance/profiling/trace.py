"""Trace a trial on a copy of the model: with every block in a place of its own, to plan; as placed, to forecast.

A forecast is not computed from a description of what a run does, which could differ from it, but the run itself: the
doors of `autobalance.placement`, and the savings and the pipeline of `autobalance.execution`, are installed on the copy
as they will be on the model. So this room uses those two, although their turn comes later. Data goes one way all the
same: what is installed is given places and numbers of parts, no profile and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.blocks import Blocks
from autobalance.execution.running import Running
from autobalance.execution.savings.host_optimizer import host_parameters, on_host
from autobalance.execution.savings.savings import install_savings
from autobalance.kernels.target import SIMULATED, Target
from autobalance.placement.install import install
from autobalance.placement.locate import DeviceLocator, Locator, Place
from autobalance.placement.place import loose_tensors
from autobalance.profiling.copying import copy_module
from autobalance.profiling.growing_calls import GrowingCalls
from autobalance.profiling.lazy import with_shape
from autobalance.profiling.observer import Observer
from autobalance.profiling.opaque import OpaqueBlocks
from autobalance.profiling.quantized import quantized_stand_ins
from autobalance.profiling.sandbox import random_state_kept
from autobalance.profiling.traced import (
    ROOT_ACCOUNT,
    Traced,
    describe_static,
    mark_moment,
    watch_calls,
    watch_gradients,
)
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.trial import Batch, Trial
from autobalance.profiling.untrained import as_if_trained, optimized
from autobalance.profiling.virtual import VirtualLocator
from autobalance.profiling.world import Kind, World, make_world


@dataclass(frozen=True)
class Subject:
    """What is traced.

    Attributes:
        root: the user's model; not touched.
        blocks: its blocks.
        trial: runs the steps.
        batches: one of every loader the run will meet, training first.
        target: whose kernels are chosen.
        kind: of elements: "fake" ones need no memory; "real" ones are a copy of the model on the CPU.
        progress: told the name of each block that begins its forward.
        opaque: stands for the blocks that cannot run on fake elements.
    """

    root: nn.Module
    blocks: Blocks
    trial: Trial
    batches: Sequence[Batch]
    target: Target = SIMULATED
    kind: Kind = "fake"
    progress: Callable[[str], None] | None = None
    opaque: OpaqueBlocks | None = None


def trace_apart(subject: Subject, last: int | None = None) -> Traced:
    """Trace with every block in a place of its own, all on one device.

    Args:
        subject: what is traced.
        last: the block that is called last, whose output goes to the loss; None: as declared, and found out if not.

    Returns:
        The trace. Accounts: block index; number of blocks plus index for loose tensors; ROOT_ACCOUNT.
    """
    count = len(subject.blocks)
    loose = {name: count + index for index, name in enumerate(loose_tensors(subject.root, subject.blocks))}
    traced = Traced(Tracer(subject.target.granule), count, loose=loose)
    world = _make_world(traced, subject, 1)
    traced.locator = VirtualLocator(traced.tracer, world)
    traced.tracer.calls = GrowingCalls(traced.tracer, traced.homes.__contains__)
    homes = _homes(subject, range(count), loose)
    with world:
        layout = _Layout(
            places=range(count),
            exit=(count - 1 if last is None else last, ROOT_ACCOUNT),
            locator=traced.locator,
            root_device=world.devices[0],
            spot_of=lambda tensor: (0, homes.get(id(tensor), ROOT_ACCOUNT)),
        )
        with world.charging(ROOT_ACCOUNT):
            _run(subject, layout, world, traced)
    called_last = traced.order[-1] if traced.order else count - 1
    if last is None and called_last != count - 1:
        return trace_apart(subject, called_last)
    return traced


def trace_placed(subject: Subject, placement: Placement) -> Traced:
    """Trace with a placement installed, on as many devices as it has.

    Args:
        subject: what is traced.
        placement: where everything is.

    Returns:
        The trace; accounts are device indices.
    """
    traced = Traced(Tracer(subject.target.granule), len(subject.blocks))
    world = _make_world(traced, subject, placement.devices)
    homes = _homes(subject, placement.assignment, placement.loose)
    with world:
        # Where all devices are one, copies are made between accounts instead.
        apart = len(world.devices) == placement.devices
        places = [world.devices[index] for index in placement.assignment] if apart else placement.assignment
        layout = _Layout(
            places=places,
            exit=(len(subject.blocks) - 1, world.devices[placement.root] if apart else placement.root),
            locator=DeviceLocator(world.devices) if apart else VirtualLocator(traced.tracer, world),
            root_device=world.devices[placement.root if apart else 0],
            spot_of=lambda tensor: _spot(homes.get(id(tensor), placement.root), apart),
            running=placement.running,
            apart=apart,
        )
        with world.charging(None if apart else placement.root):
            _run(subject, layout, world, traced)
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
        running: in how many micro-batches, and how blocks save memory.
    """

    assignment: Sequence[int]
    loose: Mapping[str, int]
    root: int
    devices: int
    running: Running = field(default_factory=Running)


@dataclass(frozen=True)
class _Layout:
    """Where everything is in a trace; `exit` is (index of the last block, place of the loss), `spot_of` gives (device
    index, account) of one of the model's tensors, `apart` whether each device of the plan is one of the trial's."""

    places: Sequence[Place]
    exit: tuple[int, Place]
    locator: Locator
    root_device: torch.device
    spot_of: Callable[[Tensor], tuple[int, int]]
    running: Running = field(default_factory=Running)
    apart: bool = False


def _homes(subject: Subject, of_block: Sequence[int], of_loose: Mapping[str, int]) -> dict[int, int]:
    """Account by the id of each of the model's registered tensors."""
    root, blocks = subject.root, subject.blocks
    homes = {id(tensor): of_loose[name] for name, tensor in loose_tensors(root, blocks).items() if name in of_loose}
    for account, modules in zip(of_block, blocks.modules, strict=True):
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                homes.setdefault(id(tensor), account)
    return homes


def _make_world(traced: Traced, subject: Subject, devices: int) -> World:
    observer = Observer(traced, subject.target)
    world = make_world(subject.kind, subject.target, devices, traced.tracer, traced.placeholders.append, observer)
    observer.world = world
    return world


def _run(subject: Subject, layout: _Layout, world: World, traced: Traced) -> None:
    root, trial, batches = subject.root, subject.trial, subject.batches
    with random_state_kept(), ExitStack() as at_the_end:
        replacing = _replacing(subject, world, layout)
        shrunk = quantized_stand_ins(root, layout.spot_of, world, traced.tracer)
        traced.quantized = len(shrunk)
        twin, traced.shared = copy_module(root, replacing, {**trial.stand_ins(root, subject.kind), **shrunk})
        twin_blocks = _blocks_of(twin, root, subject.blocks)
        describe_static(twin, traced)
        declared = getattr(twin, "forward_methods", None)
        methods = declared() if callable(declared) else None
        if subject.opaque is not None and subject.kind == "fake":
            subject.opaque.install(subject.blocks, twin_blocks, methods or {}, world, traced)
        pipeline = layout.running.pipeline()
        at = [place if isinstance(place, torch.device) else layout.root_device for place in layout.places]
        install_savings(twin, twin_blocks, layout.running, layout.places, at, layout.locator, methods)
        installed = install(twin, twin_blocks, layout.places, layout.locator, methods, layout.exit, pipeline)
        watch_calls(twin_blocks, traced, subject.progress)
        watch_gradients(twin, traced)
        optimizers = trial.prepare(twin, layout.root_device)
        away = host_parameters(twin, [world.devices[index] for index in layout.running.host_optimizer if layout.apart])
        for optimizer in optimizers:
            on_host(optimizer, away)
        if pipeline is not None:
            at_the_end.callback(pipeline.close)
            trial.split(pipeline, layout.running)
        if subject.opaque is not None and subject.kind == "fake":
            subject.opaque.optimizers.install(optimizers)
        traced.optimizers = tuple(type(optimizer).__name__ for optimizer in optimizers)
        mark = partial(mark_moment, traced, twin, optimizers)
        for batch in batches:
            trial.run(twin, batch, installed.glue, mark)
        spare = optimized([twin.get_parameter(name) for name in traced.untrained], optimizers)
        if spare and batches:
            mark("as if every parameter were trained")
            gradients = as_if_trained(spare, optimizers)
            mark_moment(traced, twin, optimizers, "optimizer, as if every parameter were trained")
            trial.run(twin, batches[0], installed.glue, mark)
            del gradients
        mark_moment(traced, twin, optimizers, "end")


def _replacing(subject: Subject, world: World, layout: _Layout) -> Callable[[Tensor], Tensor]:
    root, dtype = subject.root, subject.trial.dtype
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    streaming = [subject.blocks.modules[index] for index in layout.running.streamed if layout.apart]
    on_host = {
        id(tensor)
        for modules in streaming
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }

    def replace(tensor: Tensor) -> Tensor:
        if id(tensor) not in registered and tensor.device.type in ("cpu", "meta"):
            return world.on_host(tensor)  # a plain attribute stays on the host, as `module.to` leaves it there
        spot, streams = layout.spot_of(tensor), id(tensor) in on_host
        tensor = with_shape(tensor)
        parts = compat.parts_of(tensor)
        if parts:
            return compat.rebuilt(tensor, {name: world.on_device(part, *spot) for name, part in parts.items()})
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        made = world.on_device(cast, *spot)
        return made.to("cpu") if streams else made

    return replace


def _blocks_of(twin: nn.Module, root: nn.Module, blocks: Blocks) -> Blocks:
    """The same blocks in the copy."""
    names = {id(module): name for name, module in root.named_modules()}
    modules = tuple(tuple(twin.get_submodule(names[id(part)]) for part in group) for group in blocks.modules)
    return Blocks(blocks.names, modules)
