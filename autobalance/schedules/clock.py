"""When each device does what: launches played on clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autobalance.schedules.launches import Launch


class Hold(NamedTuple):
    """A point in the forward of a stage at which the host waits until a device has done all that it was given.

    Attributes:
        device: that is waited for.
        after: seconds of the forward that come before.
    """

    device: int
    after: float


@dataclass(frozen=True)
class Slot:
    """A stretch of time in which a device works on one launch.

    Attributes:
        device: index of the device.
        stage: index of the stage.
        micro_batch: index of the micro-batch.
        backward: False for its forward.
        start, stop: seconds since the step began.
    """

    device: int
    stage: int
    micro_batch: int
    backward: bool
    start: float
    stop: float


def run_clock(
    order: Sequence[Launch],
    devices: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    receive: Sequence[float],
    holds: Sequence[Sequence[Hold]] = (),
    launching: Sequence[tuple[float, float]] = (),
) -> tuple[Slot, ...]:
    """When each launch runs, if a device works in launch order and waits for what a launch needs.

    A forward needs that of the stage before it, a backward that of the stage after it and its own forward. A stage
    spends half of its receive time before its forward, on its inputs, and half with its backward, on their gradients;
    all of it before the forward where there is no backward. The host launches ahead of the devices, except in forwards
    in which it has to wait for one of them.

    Example:
        >>> slots = run_clock(launch_order("1f1b", 4, 4), range(4), [1.0] * 4, [2.0] * 4, [0.0] * 4)
        >>> max(slot.stop for slot in slots)
        21.0

    Args:
        order: launches; what one needs comes before it.
        devices: device of each stage.
        forward, backward: seconds for one micro-batch, for each stage.
        receive: seconds that a stage's inputs, and their gradients, are on their way, for each stage.
        holds: where the host waits in the forward of each stage; empty: nowhere.
        launching: seconds that the host takes to launch the forward, and the backward, of each stage, one after the
            other for all devices; empty: none.

    Returns:
        A slot for each launch, in their order; the step takes until the latest `stop`.

    Raises:
        ValueError: a launch comes before one that it needs.
    """
    forwards_alone = not any(launch.backward for launch in order)
    last = len(devices) - 1
    host = 0.0
    free: dict[int, float] = {}  # by device
    done: dict[tuple[int, int, bool], float] = {}
    slots = []
    for launch in order:
        stage, number = launch.stage, launch.micro_batch
        needs = []
        if launch.backward:
            needs.append((stage, number, False))
        if stage < last if launch.backward else stage > 0:
            needs.append((stage + 1 if launch.backward else stage - 1, number, launch.backward))
        missing = [need for need in needs if need not in done]
        if missing:
            raise ValueError(f"{_told(stage, number, launch.backward)} is launched before {_told(*missing[0])}")
        device = devices[stage]
        start = max([host, free.get(device, 0.0), *(done[need] for need in needs)])
        host += launching[stage][launch.backward] if launching else 0.0
        share = receive[stage] if forwards_alone else receive[stage] / 2
        stop = max(host, start + share + (backward[stage] if launch.backward else forward[stage]))
        for hold in holds[stage] if holds and not launch.backward else ():
            own = stop - forward[stage] + hold.after
            host = max(host, own if hold.device == device else free.get(hold.device, 0.0))
            stop = max(stop, host + forward[stage] - hold.after)
        free[device] = done[stage, number, launch.backward] = stop
        slots.append(Slot(device, stage, number, launch.backward, start, stop))
    return tuple(slots)


def _told(stage: int, number: int, is_backward: bool) -> str:
    return f"the {'backward' if is_backward else 'forward'} of micro-batch {number} in stage {stage}"
