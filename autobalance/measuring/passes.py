"""One module on one device: forward and backward for real, with its bytes counted and its time taken."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autobalance.compat import DispatchMode
from autobalance.devices.roofline import Work
from autobalance.measuring.call import Call
from autobalance.measuring.meters import Meter
from autobalance.measuring.returned import Returned, Storages
from autobalance.measuring.visit import Visit
from autobalance.profiling.work import WorkCounter

REPEATS = 5
"""Timed passes, of which the median counts; one more before them warms up."""


@dataclass(frozen=True)
class Passes:
    """What one call took. Bytes are above those that the module's weights and buffers take.

    Attributes:
        forward_time, backward_time: seconds, medians.
        inputs: bytes of what it is given.
        outputs: bytes of what it returns, but for what it was given.
        saved: bytes that the graph keeps once inputs and outputs are let go.
        kept: those of them that are neither inputs nor outputs.
        output_gradients: bytes of the gradients from which backward starts.
        gradients: bytes of all gradients once backward has run.
        weight_gradients: those of them that are the module's parameters'.
        forward_peak, backward_peak: most bytes at once, inputs and gradients of outputs included.
        saves_inputs: for each tensor that goes in, whether the graph keeps it.
        returns_gradient: for each tensor that goes in, whether it is given a gradient.
        trains: for each of the module's parameters, whether it is given a gradient.
        returned: what comes out, without numbers.
        work: what was computed forward and backward.
    """

    forward_time: float = 0.0
    backward_time: float = 0.0
    inputs: int = 0
    outputs: int = 0
    saved: int = 0
    kept: int = 0
    output_gradients: int = 0
    gradients: int = 0
    weight_gradients: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    saves_inputs: tuple[bool, ...] = ()
    returns_gradient: tuple[bool, ...] = ()
    trains: tuple[bool, ...] = ()
    returned: Returned = field(default_factory=Returned)
    work: tuple[tuple[Work, ...], tuple[Work, ...]] = ((), ())


def run_passes(module: nn.Module, call: Call, meter: Meter, repeats: int = REPEATS) -> Passes:
    """Call a module that is on the meter's device, forward and backward, several times.

    Example:
        >>> run_passes(nn.Linear(4, 4), Call("forward", (torch.ones(2, 4),), {}), make_meter("cpu")).saved
        32

    Args:
        module: on the device; its gradients are None afterwards.
        call: what it is given.
        meter: of the device.
        repeats: how many passes are timed.

    Returns:
        The bytes of the last pass, and the medians of the times.

    Raises:
        torch.OutOfMemoryError: it does not fit on the device.
    """
    counter = WorkCounter()
    with _Counting(counter), Visit(module, call, meter) as visit:  # libraries also choose their kernels here
        visit.forward()
        visit.let_go()
        visit.backward()
    times = [_timed(module, call, meter) for _ in range(repeats)] or [(0.0, 0.0)]
    forward, backward = (statistics.median(direction) for direction in zip(*times, strict=True))
    return _counted(module, call, meter, forward, backward, (counter.work("forward", 0), counter.work("backward", 0)))


def run_forward(module: nn.Module, call: Call, meter: Meter, returned: Returned) -> Any:
    """One forward.

    Args:
        module: on the meter's device.
        call: what it is given; what the module puts into its containers is put into them.
        meter: of the device.
        returned: what comes out of such a call.

    Returns:
        What the module returns, on the host; what is part of a graph requires gradients there, but has no graph.
    """
    with Visit(module, call, meter, private=False) as visit:
        visit.forward(saving=False)
        return visit.taken_home(returned)


def _timed(module: nn.Module, call: Call, meter: Meter) -> tuple[float, float]:
    with Visit(module, call, meter) as visit:
        forward = meter.seconds(visit.forward)
        visit.let_go()
        return forward, meter.seconds(visit.backward) if visit.is_differentiable else 0.0


def _counted(
    module: nn.Module, call: Call, meter: Meter, forward_time: float, backward_time: float, work: Any
) -> Passes:
    """The bytes of one pass."""
    with meter.watching():
        before = meter.allocated()
        meter.reset()
        with Visit(module, call, meter) as visit:
            inputs = meter.allocated() - before
            visit.forward()
            forward_peak = meter.peak() - before
            going_in = Storages(visit.inputs, meter.granule, meter.device)
            returned = visit.returned()
            coming_out = Storages(visit.outputs(returned), meter.granule, meter.device)
            visit.let_go()
            saved = meter.allocated() - before
            saves_inputs, saves_outputs = going_in.alive(), coming_out.alive()
            meter.reset()
            visit.backward()
            parameters = list(module.parameters())
            return Passes(
                forward_time=forward_time,
                backward_time=backward_time,
                inputs=inputs,
                outputs=coming_out.nbytes(without=going_in),
                saved=saved,
                kept=max(0, saved - going_in.nbytes(saves_inputs) - coming_out.nbytes(saves_outputs, going_in)),
                output_gradients=returned.gradient_bytes(meter.granule),
                gradients=meter.allocated() - before,
                weight_gradients=Storages([p.grad for p in parameters if p.grad is not None], meter.granule).nbytes(),
                forward_peak=forward_peak,
                backward_peak=meter.peak() - before,
                saves_inputs=saves_inputs,
                returns_gradient=visit.returns_gradient,
                trains=tuple(parameter.grad is not None for parameter in parameters),
                returned=returned.keeping(saves_outputs),
                work=work,
            )


class _Counting(DispatchMode):
    """Adds up the work of all operations."""

    def __init__(self, counter: WorkCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._counter(func, args, kwargs or {}, result, 0)
        return result
