"""What a trace sees beside storages: calls of blocks, work, and parameters used where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.blocks import Blocks
from autobalance.kernels import cpu
from autobalance.kernels.scratch import Taken, taken_inside
from autobalance.kernels.target import SIMULATED, Target
from autobalance.profiling.nested import tensors_in
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.virtual import VirtualLocator, is_crossing, ways_back_from
from autobalance.profiling.waits import Waits
from autobalance.profiling.work import WorkCounter
from autobalance.profiling.world import World

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
        untrained: names of trainable parameters that are given no gradient.
        optimizers: class names of the optimizers.
        quantized: how many layers have weights that shrink when they reach the device.
        waits: lines at which the host waits for the device.
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
    untrained: dict[str, None] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    quantized: int = 0
    waits: Waits = field(default_factory=Waits)
    foreign: set[tuple[int, int]] = field(default_factory=set)
    homes: dict[int | None, int] = field(default_factory=dict)


def describe_static(twin: nn.Module, traced: Traced) -> None:
    tracer = traced.tracer
    for kind, tensors in (("buffers", twin.buffers()), ("weights", twin.parameters())):
        for tensor in tensors:
            for part in compat.parts_of(tensor).values() or (tensor,):
                index = tracer.find(part.untyped_storage())
                if index is not None:
                    tracer.kinds[index] = kind
                    traced.homes[index] = tracer.accounts[index]


class Observer:
    """Sees every operation: counts its work and what its kernel takes inside, and notes what is used where it is not.

    Args:
        traced: what is seen is written there.
        target: whose kernels they are.
    """

    world: World

    def __init__(self, traced: Traced, target: Target = SIMULATED) -> None:
        self._traced = traced
        self._target = target
        self._seen = 0
        self._benchmarked: set[Any] = set()

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        traced = self._traced
        traced.work(func, args, kwargs, result, account)
        if traced.tracer.fans.is_spread:
            self._follow_gradients(func, args, kwargs)
        if compat.accumulates_gradients(func, args, kwargs, is_crossing):
            self._add_gradients(args[0], args[1], result)
        self._tell_maker(func, result)
        if not traced.work.optimizing:
            traced.waits.saw(func, args)
        if account is not None and self._target.kind != "simulated":
            self._charge_scratch(func, args, kwargs, result, account)
        self._note_foreign(args)

    def _add_gradients(self, gradient: Tensor, other: Tensor, result: Tensor) -> None:
        """Autograd adds to a gradient in place if nobody else holds it (torch/csrc/autograd/input_buffer.cpp,
        accumulate), but never to a tensor of a subclass or under a dispatch mode, as all are in a trace."""
        tracer = self._traced.tracer
        in_place = self._target.kind != "simulated" and compat.is_last_reference(gradient)
        earlier, later = tracer.find(gradient.untyped_storage()), tracer.find(other.untyped_storage())
        if in_place and gradient.shape == result.shape:
            tracer.written_to(gradient.untyped_storage(), result.untyped_storage())
        total = tracer.find(result.untyped_storage())
        if not tracer.fans.is_spread or earlier is None or later is None or total is None:
            return
        node = compat.current_node()
        ways = [way for way in ways_back_from(node) if way.shape == tuple(result.shape)]
        for way in ways[:1]:
            way.add(compat.number_of(node), earlier, later, total)
        tracer.fans.meet(earlier, later, total)

    def _follow_gradients(self, func: Any, args: Any, kwargs: Any) -> None:
        node, tracer = compat.current_node(), self._traced.tracer
        if node is None:
            return
        ways = list(ways_back_from(node))
        for way in ways:
            way.comes(compat.number_of(node), len(tracer.events))
        if ways and compat.accumulates_gradients(func, args, kwargs, is_crossing):
            return
        for tensor in tensors_in(args):
            if (read := tracer.find(tensor.untyped_storage())) is not None:
                tracer.fans.read(read, len(tracer.events))

    def _tell_maker(self, func: Any, result: Any) -> None:
        tracer = self._traced.tracer
        if len(tracer.sizes) > self._seen:
            shape = "x".join(map(str, result.shape)) if isinstance(result, Tensor) else ""
            tracer.made(self._seen, f"{func.__name__.partition('.')[0]} {shape}".rstrip())
            self._seen = len(tracer.sizes)

    def _charge_scratch(self, func: Any, args: Any, kwargs: Any, result: Any, account: int) -> None:
        tracer = self._traced.tracer
        if self._target.kind == "cpu":
            taken = Taken(cpu.taken_inside(func, args, result))
        else:
            taken = taken_inside(func, args, kwargs, result, self._target)
        for name, nbytes in taken.workspaces:
            tracer.workspace(name, nbytes, account)
        maker, kind = func.__name__.partition(".")[0], "allowance" if taken.is_allowance else "scratch"
        tracer.transient(taken.transient, account, maker, kind)
        for call in taken.calls:
            if torch.backends.cudnn.benchmark and call.problem not in self._benchmarked:
                self._benchmarked.add(call.problem)
                tracer.give_back()
            tracer.transient(call.workspace, account, maker, kind)

    def _note_foreign(self, args: Any) -> None:
        traced = self._traced
        locator, inside = traced.locator, self.world.current_account
        if locator is None or inside is None or inside == ROOT_ACCOUNT or compat.in_backward():
            return
        for tensor in tensors_in(args):
            home = traced.homes.get(traced.tracer.find(tensor.untyped_storage()), inside)
            if home == inside:
                continue
            if home < traced.count:
                traced.foreign.add((inside, home))
            else:
                locator.exchanges.setdefault((home, inside))


def mark_moment(traced: Traced, twin: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
    """Name the moment, and say which of the live storages are gradients and optimizer state by now."""
    tracer = traced.tracer
    traced.work.optimizing = "optimizer" in name
    for parameter in twin.parameters():
        if parameter.grad is not None:
            tracer.describe(parameter.grad.untyped_storage(), "gradients")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for tensor in tensors_in(list(state.values())):
                tracer.describe(tensor.untyped_storage(), "optimizer")
    tracer.mark(name)


def watch_calls(blocks: Blocks, traced: Traced, progress: Callable[[str], None] | None = None) -> None:
    """Note the order of first calls and the bytes of outputs, and tell `progress` the name of each block called."""

    def calling(name: str, module: nn.Module, args: Any) -> None:
        if progress is not None:
            progress(name)

    def called(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if index not in traced.outputs:
            traced.order.append(index)
        storages = {compat.storage_key(tensor.untyped_storage()): tensor for tensor in tensors_in(output)}
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        traced.outputs[index] = max(traced.outputs.get(index, 0), nbytes)

    for index, modules in enumerate(blocks.modules):
        for module in modules:
            module.register_forward_pre_hook(partial(calling, blocks.names[index]))
            module.register_forward_hook(partial(called, index))


def watch_gradients(twin: nn.Module, traced: Traced) -> None:
    """Note which trainable parameters are given no gradient."""

    def given(name: str, parameter: Tensor) -> None:
        traced.untrained.pop(name, None)

    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            traced.untrained[name] = None
            parameter.register_post_accumulate_grad_hook(partial(given, name))
