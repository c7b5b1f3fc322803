"""How long each stage of a plan takes for a micro-batch, by events on the streams of its device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from autobalance import compat
from autobalance.blocks import find_blocks
from autobalance.execution.micro_batch import current_micro_batch
from autobalance.execution.running import running_of
from autobalance.partitioning.plan import Plan
from autobalance.placement.contents import tensors_in

Visit = tuple[int, int | None]
"""A stage, and the number of a micro-batch; None where batches stay whole."""


@dataclass
class _Span:
    """What a device does for one visit, there or back, between two events of its stream."""

    goes_back: bool
    begin: Any
    end: Any


class _Inside(threading.local):
    """How many blocks this thread is inside of."""

    depth = 0


class StageTimes:
    """Times the stages between `start_again` and `read`; nobody waits for a device meanwhile.

    The forward of a stage lasts from the first of its blocks that is entered, whose inputs are there, to the last one
    that is left; its backward from the first gradient of what a block of it has returned to the last one of what its
    blocks were given, or of their parameters where no gradient goes further back. What copies that come in between are
    waited for counts, as do the user's operations between the blocks. Blocks that run by other methods than their
    forward are not seen.

    Example:
        >>> times = StageTimes(model, plan, devices)      # doctest: +SKIP
        >>> times.start_again()                           # doctest: +SKIP
        >>> trainer_runs_a_step()                         # doctest: +SKIP
        >>> times.read()                                  # doctest: +SKIP
        (0.012, 0.011)

    Args:
        root: the model, placed by the plan.
        plan: whose stages are timed.
        devices: the torch device of each device of the plan.
    """

    def __init__(self, root: nn.Module, plan: Plan, devices: Sequence[torch.device]) -> None:
        self._devices = [devices[stage.device] for stage in plan.stages]
        self._stage_of = running_of(plan).stage_of
        # Its backwards are suspended as soon as the gradient of an input is there, before other hooks are told of it.
        self._stops_at_inputs = plan.schedule == "looped"
        self._forget()
        self._is_on = False
        self._handles: list[Any] = []
        if not plan.stages or not _has_events(self._devices):
            return
        for block, modules in enumerate(find_blocks(root).ordered(plan.block_names).modules):
            for module in modules:
                # The doors of blocks send what comes in before this, and what goes out after it.
                before = module.register_forward_pre_hook(partial(self._enter, block), with_kwargs=True)
                after = module.register_forward_hook(partial(self._leave, block), prepend=True, always_call=True)
                self._handles += [before, after]

    def start_again(self) -> None:
        """Forget all times, and time what comes from now on, if the devices have a clock that runs."""
        self._forget()
        self._is_on = bool(self._handles) and _clock_runs(self._devices)

    def read(self) -> tuple[float | None, ...]:
        """Seconds that each stage has taken for a micro-batch, there and back: their mean over all micro-batches.

        To be called when the devices are done with the step.

        Returns:
            None for a stage that was not seen; nothing at all where no stage was, and where devices have no clock.
        """
        self._is_on = False
        visits = list(self._spans)
        if any(number is not None for _, number in visits):  # whole batches before were a test
            visits = [visit for visit in visits if visit[1] is not None]
        found: list[list[float]] = [[] for _ in self._devices]
        try:
            for visit in visits:
                found[visit[0]].append(sum(span.begin.elapsed_time(span.end) for span in self._spans[visit]) / 1e3)
        except RuntimeError:
            if self._devices[0].type != "simulated":
                raise
            return ()  # the virtual clock was started again in the midst of the step
        if not visits:
            return ()
        return tuple(sum(seconds) / len(seconds) if seconds else None for seconds in found)

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
        self._is_on = False
        while self._handles:
            self._handles.pop().remove()
        self._forget()

    def _forget(self) -> None:
        self._spans: dict[Visit, list[_Span]] = {}
        self._open: dict[torch.device, tuple[Visit, _Span]] = {}
        self._inside = _Inside()
        self._nodes: list[Any] = []

    def _enter(self, block: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.depth += 1
        if self._inside.depth > 1 or not self._is_on or compat.in_backward():
            return
        visit = self._visit_of(block)
        self._note(visit, goes_back=False, may_begin=True)
        if not torch.is_grad_enabled():
            return
        given = [tensor for tensor in _in_graph((args, kwargs)) if tensor.device == self._devices[visit[0]]]
        for tensor in given:
            tensor.register_hook(partial(self._gradient, visit, False))
        if not given or self._stops_at_inputs:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    # A hook of the parameter itself would be the user's, of which strategies take account.
                    node = get_gradient_edge(parameter).node
                    node.register_hook(partial(self._accumulated, visit))
                    self._nodes.append(node)  # nobody else holds it before the block has run

    def _leave(self, block: int, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.depth -= 1
        if self._inside.depth or not self._is_on or compat.in_backward():
            return
        visit = self._visit_of(block)
        self._note(visit, goes_back=False, may_begin=False)
        for tensor in _in_graph(output):
            tensor.register_hook(partial(self._gradient, visit, True))

    def _visit_of(self, block: int) -> Visit:
        micro_batch = current_micro_batch()
        return self._stage_of[block], None if micro_batch is None else micro_batch.index

    def _gradient(self, visit: Visit, is_of_output: bool, gradient: Tensor) -> None:
        self._note(visit, goes_back=True, may_begin=is_of_output)

    def _accumulated(self, visit: Visit, gradients: Any, outputs: Any) -> None:
        self._note(visit, goes_back=True, may_begin=False)

    def _note(self, visit: Visit, goes_back: bool, may_begin: bool) -> None:
        """Begin a span, or let the one that is open on the device last until now."""
        if not self._is_on:
            return
        device = self._devices[visit[0]]
        last, span = self._open.get(device, (None, None))
        if span is not None and last == visit and span.goes_back == goes_back:
            _record(span.end, device)
        elif may_begin:
            spans = self._spans.setdefault(visit, [])
            if not goes_back and any(each.goes_back for each in spans):
                spans.clear()  # the forward of a test, or of a batch that runs again
            span = _Span(goes_back, _event(device), _event(device))
            spans.append(span)
            self._open[device] = visit, span
            _record(span.begin, device)
            _record(span.end, device)

    def __reduce__(self) -> tuple[Any, ...]:
        return _asleep, ()  # the blocks of a model's copy are not those of the run


def _asleep() -> StageTimes:
    """What stands in the hooks of a model's copy, and times nothing."""
    made = StageTimes.__new__(StageTimes)
    made._is_on, made._handles = False, []
    made._forget()
    return made


def _in_graph(value: Any) -> Iterator[Tensor]:
    """Tensors whose gradients a backward computes on its way; a hook of a leaf would stay for later ones."""
    return (tensor for tensor in tensors_in(value) if tensor.requires_grad and not tensor.is_leaf)


def _has_events(devices: Sequence[torch.device]) -> bool:
    return all(device.type in ("cuda", "simulated") for device in devices)


def _clock_runs(devices: Sequence[torch.device]) -> bool:
    if devices[0].type != "simulated":
        return True
    try:
        torch.get_device_module(devices[0]).elapsed()
    except RuntimeError:
        return False
    return True


def _event(device: torch.device) -> Any:
    return torch.get_device_module(device).Event(enable_timing=True)


def _record(event: Any, device: torch.device) -> None:
    event.record(torch.get_device_module(device).current_stream(device))
