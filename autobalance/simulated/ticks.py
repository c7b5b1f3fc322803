"""How operations on simulated tensors move the clock: kernels, copies, and the host that waits for numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from autobalance.devices.roofline import Work, kernel_seconds
from autobalance.simulated import clock, pinned
from autobalance.simulated.clock import Clock, Place
from autobalance.simulated.operation import host_waits
from autobalance.simulated.tensor import SimulatedTensor
from autobalance.simulated.work import bytes_in, work_of

if TYPE_CHECKING:
    from autobalance.simulated.dispatch import Call

_aten = torch.ops.aten


def tick(hands: Clock, call: Call, result: Any) -> None:
    """Let the time of one operation pass.

    Args:
        hands: the clock, which runs.
        call: the operation.
        result: what it returned.
    """
    index = call.operands.index
    if call.operation.moves and _copy(hands, call, result):
        return
    if call.operation.by_element:
        _by_device(hands, call, result)
    elif index is not None:
        work = work_of(call.func, call.args, call.kwargs, result)
        if work is not None:
            _run(hands, index, work)
    if index is not None and host_waits(call.func, call.args):  # what it reads is a number or few
        hands.copy_with_host(clock.current_stream(index), 0, to_host=True, host_waits=True)


def _run(hands: Clock, index: int, work: Work) -> None:
    device = clock.device_at(index)
    seconds = kernel_seconds(work, device.rate(work.arithmetic), device.bandwidth)
    hands.launch(clock.current_stream(index), seconds)


def _by_device(hands: Clock, call: Call, result: Any) -> None:
    """A kernel on each device that the lists have tensors on, as optimizers group them."""
    traffic: dict[int, int] = defaultdict(int)
    for value in (*call.args, *call.kwargs.values(), result):
        for item in value if isinstance(value, (list, tuple)) else ():
            index = place_of(item)
            if index is not None:
                traffic[index] += bytes_in(item)
    for index, nbytes in traffic.items():
        _run(hands, index, Work("", 0, nbytes, 1))


def _copy(hands: Clock, call: Call, result: Any) -> bool:
    """A copy from one place to another; False where both are one, so that it is an operation like any other."""
    source, target, non_blocking = _ends(call, result)
    sender, receiver = place_of(source), place_of(target)
    if sender == receiver:
        return False
    nbytes = bytes_in(target)
    if sender is not None and receiver is not None:
        hands.copy(clock.current_stream(sender), clock.current_stream(receiver), nbytes)
        return True
    index, on_host = (sender, target) if sender is not None else (receiver, source)
    assert index is not None, "the two places differ"
    waits = not (non_blocking and pinned.is_marked(on_host))
    hands.copy_with_host(clock.current_stream(index), nbytes, to_host=receiver is None, host_waits=waits)
    return True


def _ends(call: Call, result: Any) -> tuple[Any, Any, bool]:
    """What is read, what is written, and whether the host need not wait."""
    if call.func is _aten._to_copy.default:
        return call.args[0], result, bool(call.kwargs.get("non_blocking"))
    first, second = call.args[:2]
    non_blocking = bool(call.args[2] if len(call.args) > 2 else call.kwargs.get("non_blocking"))
    return (second, first, non_blocking) if call.func is _aten.copy_.default else (first, second, non_blocking)


def place_of(value: Any) -> Place:
    """Index of the device that a tensor is on; None for the host, and for what is no tensor.

    Args:
        value: an argument or result of an operation.
    """
    return value.index if isinstance(value, SimulatedTensor) else None
