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
from autobalance.execution.savings.recompute import Versions, changed_buffer, versions_of_buffers
from autobalance.placement.contents import tensors_in
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.virtual import VirtualLocator
from autobalance.profiling.waits import Waits
from autobalance.profiling.work import WorkCounter

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
    """Say which storages are weights and buffers, and to whom these are charged.

    Args:
        twin: the copy of the model.
        traced: of the trial.
    """
    tracer = traced.tracer
    for kind, tensors in (("buffers", twin.buffers()), ("weights", twin.parameters())):
        for tensor in tensors:
            for part in compat.parts_of(tensor).values() or (tensor,):
                index = tracer.find(part.untyped_storage())
                if index is not None:
                    tracer.kinds[index] = kind
                    traced.homes[index] = tracer.accounts[index]


def mark_moment(traced: Traced, twin: nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
    """Name the moment, and say which of the live storages are gradients and optimizer state by now.

    Args:
        traced: of the trial.
        twin: the copy of the model.
        optimizers: of the copy.
        name: of the moment, which begins a phase.
    """
    tracer = traced.tracer
    traced.work.optimizing = "optimizer" in name
    traced.waits.begin(name)
    for parameter in twin.parameters():
        if parameter.grad is not None:
            tracer.describe(parameter.grad.untyped_storage(), "gradients")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for tensor in tensors_in(list(state.values())):
                tracer.describe(tensor.untyped_storage(), "optimizer")
    tracer.mark(name)


def watch_calls(blocks: Blocks, traced: Traced, progress: Callable[[str], None] | None = None) -> None:
    """Note the order of first calls and the bytes of outputs, and tell `progress` the name of each block called.

    Args:
        blocks: of the copy.
        traced: of the trial.
        progress: told the name of each block that begins its forward.
    """

    buffers: dict[nn.Module, Versions] = {}

    def calling(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        traced.waits.call(index)
        if progress is not None:
            progress(blocks.names[index])
        if traced.tracer.calls is not None:
            buffers[module] = versions_of_buffers(module)
            traced.tracer.calls.begins(index, tensors_in((args, kwargs)))

    def called(index: int, module: nn.Module, args: Any, output: Any) -> None:
        if traced.tracer.calls is not None:
            if changed_buffer(module, buffers.pop(module, [])) is not None:
                traced.tracer.calls.change_others(index)
            traced.tracer.calls.ends(index, tensors_in(output))
        if index not in traced.outputs:
            traced.order.append(index)
        storages = {compat.storage_key(tensor.untyped_storage()): tensor for tensor in tensors_in(output)}
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        traced.outputs[index] = max(traced.outputs.get(index, 0), nbytes)

    for index, modules in enumerate(blocks.modules):
        for module in modules:
            module.register_forward_pre_hook(partial(calling, index), with_kwargs=True)
            module.register_forward_hook(partial(called, index))


def watch_gradients(twin: nn.Module, traced: Traced) -> None:
    """Note which trainable parameters are given no gradient, and when others are given theirs.

    Args:
        twin: the copy of the model.
        traced: of the trial.
    """

    def given(name: str, parameter: Tensor) -> None:
        traced.untrained.pop(name, None)
        if parameter.grad is not None:
            traced.tracer.added(parameter.grad.untyped_storage())

    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            traced.untrained[name] = None
            parameter.register_post_accumulate_grad_hook(partial(given, name))
