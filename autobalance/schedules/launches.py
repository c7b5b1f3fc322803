"""The order in which one host thread launches the stages of micro-batches.

Memory follows this order and not the devices' clocks: an allocator serves requests as they are launched. Launches for
different devices do not wait for one another, so that a device works in its own order, as far as inputs are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

SCHEDULES = ("naive", "gpipe", "1f1b", "looped")
"""Names of the schedules, simplest first."""


@dataclass(frozen=True)
class Launch:
    """The forward or the backward of one micro-batch in one stage.

    Attributes:
        stage: index of the stage, in call order.
        micro_batch: index of the micro-batch.
        backward: False for its forward.
    """

    stage: int
    micro_batch: int
    backward: bool


def launch_order(
    schedule: str, stages: int, micro_batches: int, *, devices: Sequence[int] | None = None, training: bool = True
) -> tuple[Launch, ...]:
    """The order in which one host thread launches; each device works in the part of it that is its own.

    - `"naive"`: forward and backward of a micro-batch, then the next one.
    - `"gpipe"`: all forwards, then all backwards, the last micro-batch first, as one backward of the sum of all losses
      takes them (GPipe, Huang et al. 2019, arXiv 1811.06965).
    - `"1f1b"`: as many forwards as there are stages to the end, then backward and forward in turns (PipeDream-Flush,
      Narayanan et al. 2021, arXiv 2006.09503), launched as a wavefront: the backward of a micro-batch follows its last
      forward as a whole.
    - `"looped"`: stages visit devices more than once; a device takes the micro-batch that is furthest on, so that on a
      loop groups of as many micro-batches as devices go round after round. Backwards come in exactly the reverse
      order, as one backward of the sum takes them (breadth-first, Lamy-Poirier 2023, arXiv 2211.05953).

    Without backwards, micro-batches go through one by one, since devices then see the same order and hold the least;
    but on a loop.

    Example:
        >>> [(launch.stage, launch.backward) for launch in launch_order("naive", stages=2, micro_batches=1)]
        [(0, False), (1, False), (1, True), (0, True)]

    Args:
        schedule: one of `SCHEDULES`.
        stages: how many there are.
        micro_batches: how many there are.
        devices: device of each stage; needed for `"looped"`, without effect on the others.
        training: False for forwards alone.

    Raises:
        ValueError: a schedule that does not exist, nothing to launch, or devices that are missing or too few.
    """
    _check(schedule, stages, micro_batches, devices)
    if schedule == "looped":
        forwards = tuple(_furthest_first(devices or (), range(micro_batches)))
        return (*forwards, *_mirrored(forwards)) if training else forwards
    if not training or schedule == "naive":
        return tuple(launch for number in range(micro_batches) for launch in _whole(stages, number, training))
    if schedule == "gpipe":
        forwards = tuple(launch for number in range(micro_batches) for launch in _whole(stages, number, False))
        return (*forwards, *_mirrored(forwards))
    return tuple(_wavefront(stages, micro_batches))


def in_flight(order: Sequence[Launch], stages: int) -> tuple[int, ...]:
    """The most micro-batches whose saved bytes a stage holds at once, for each stage.

    Without backwards nothing is saved, and the micro-batch that a stage works on is the only one it holds.

    Example:
        >>> in_flight(launch_order("1f1b", stages=3, micro_batches=8), stages=3)
        (3, 2, 1)

    Args:
        order: launches.
        stages: how many stages there are.
    """
    held, most = [0] * stages, [0] * stages
    is_training = any(launch.backward for launch in order)
    for launch in order:
        held[launch.stage] += -1 if launch.backward else 1
        most[launch.stage] = max(most[launch.stage], held[launch.stage])
    return tuple(most) if is_training else tuple(min(1, count) for count in most)


def _check(schedule: str, stages: int, micro_batches: int, devices: Sequence[int] | None) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} does not exist; choose one of {', '.join(map(repr, SCHEDULES))}")
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"{stages} stages and {micro_batches} micro-batches leave nothing to launch: say 1 or more")
    if devices is None and schedule == "looped":
        raise ValueError("schedule='looped' depends on where stages are: say the device of each stage as devices=")
    if devices is not None and len(devices) != stages:
        raise ValueError(f"devices has {len(devices)} entries for {stages} stages; it says the device of each stage")


def _whole(stages: int, number: int, training: bool) -> Iterator[Launch]:
    forwards = [Launch(stage, number, False) for stage in range(stages)]
    yield from forwards
    if training:
        yield from _mirrored(forwards)


def _mirrored(forwards: Sequence[Launch]) -> Iterator[Launch]:
    return (Launch(launch.stage, launch.micro_batch, True) for launch in reversed(forwards))


def _wavefront(stages: int, micro_batches: int) -> Iterator[Launch]:
    """Every tick takes each micro-batch that has begun one stage further, and the first of them back as a whole."""
    for tick in range(micro_batches + stages - 1):
        for stage in reversed(range(stages)):
            if 0 <= tick - stage < micro_batches:
                yield Launch(stage, tick - stage, False)
        first = tick - (stages - 1)
        if first >= 0:
            for stage in reversed(range(stages)):
                yield Launch(stage, first, True)


def _furthest_first(devices: Sequence[int], micro_batches: Iterable[int]) -> Iterator[Launch]:
    """Forwards by ticks: in each, a device takes the micro-batch that is furthest on among those that wait for it."""
    ready = [(0, number) for number in micro_batches]  # next stage and micro-batch
    while ready:
        chosen: dict[int, tuple[int, int]] = {}
        for stage, number in ready:
            best = chosen.get(devices[stage])
            if best is None or (-stage, number) < (-best[0], best[1]):
                chosen[devices[stage]] = stage, number
        moved = set(chosen.values())
        for stage, number in sorted(moved, reverse=True):
            yield Launch(stage, number, False)
        ready = [
            (stage + 1, number) if (stage, number) in moved else (stage, number)
            for stage, number in ready
            if (stage, number) not in moved or stage + 1 < len(devices)
        ]
