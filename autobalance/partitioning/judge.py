"""What an assignment really takes: its launch order, replayed and timed. Plans and scores are judged alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autobalance.devices.device import Device
from autobalance.partitioning.replay import replay
from autobalance.partitioning.savings.host_optimizer import host_optimizer as host_optimizer_of
from autobalance.partitioning.savings.host_optimizer import sharing_of
from autobalance.partitioning.savings.savings import saving_costs
from autobalance.partitioning.stage import Stage
from autobalance.partitioning.times import clocked, launch_seconds, runs_of, stages_of, step_seconds
from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import Timeline
from autobalance.schedules.launches import Launch, in_flight, launch_order
from autobalance.timelines.host_storages import tells_optimizer, with_host
from autobalance.timelines.micro_batches import interleaved
from autobalance.timelines.recompute import with_savings

# Share of a step's time from which on devices are seen to wait for a host that launches for others.
_BUSY_HOST = 0.5


@dataclass(frozen=True)
class Judged:
    """An assignment with what it takes.

    Attributes:
        stages: with their times and what is in flight.
        peaks: bytes per device.
        seconds: of a step without the optimizer's.
        once: what optimizers on the host add to that once per step.
        moved: bytes over the links to the host in a step, but for the optimizer's.
    """

    stages: tuple[Stage, ...]
    peaks: tuple[int, ...]
    seconds: float
    once: float = 0.0
    moved: int = 0


def judge(
    profile: Profile,
    assignment: Sequence[int],
    root: int,
    devices: Sequence[Device],
    crossings: Sequence[Crossing],
    *,
    schedule: str = "naive",
    micro_batches: int = 1,
    saving: Sequence[str] = (),
    streamed: Sequence[int] = (),
    host_optimizer: Sequence[int] = (),
) -> Judged:
    """Replay and time an assignment.

    Example:
        >>> judge(profile, [0, 0, 1], 1, devices, crossings_of(profile)).peaks

    Args:
        profile: of one micro-batch.
        assignment: device index per block.
        root: device index of batch, loss and metrics.
        devices: of the question.
        crossings: tensors that go from block to block.
        schedule: order of the micro-batches.
        micro_batches: how many there are.
        saving: what becomes of the tensors that each block saves; empty: all are kept.
        streamed: blocks whose weights stream from the host.
        host_optimizer: devices whose optimizer state is on the host.
    """
    places = [device for _, _, device in runs_of(assignment)]
    order = launch_order(schedule, len(places), micro_batches, devices=places, training=profile.training)
    blocks = profile.blocks
    carried, staged = _streaming(profile, streamed)
    held = in_flight(order, len(places))
    stages = stages_of(profile, assignment, root, devices, crossings, held, saving, carried)
    away = [block for block, device in enumerate(assignment) if device in host_optimizer]
    timeline = launched(profile, stages, order, micro_batches, saving, streamed, away)
    peaks = replay(timeline, assignment, root, len(devices))
    knows = tells_optimizer(profile.timeline)
    for device in range(len(devices)):
        # Weights that stream are on the device while their block runs, and while the one before it does; none are
        # fetched ahead of the pass that needs them.
        here = [block for block in sorted(streamed) if assignment[block] == device]
        follows = [*(staged[block] for block in here[1:]), 0]
        peaks[device] += max((staged[block] + after for block, after in zip(here, follows, strict=False)), default=0)
        if not knows:
            rest = (block for block in away if assignment[block] == device and block not in streamed)
            peaks[device] -= sum(blocks[block].optimizer for block in rest)
    seconds = _seconds(profile, stages, order, micro_batches, devices)
    with_host_steps = [
        replace(stage, backward_time=stage.backward_time + share)
        for stage, share in zip(stages, _shares(profile, stages, away, micro_batches, devices), strict=True)
    ]
    once = _seconds(profile, with_host_steps, order, micro_batches, devices) - seconds if away else 0.0
    offloaded = (row.saved for row, word in zip(blocks, saving, strict=False) if word == "offload")
    moved = micro_batches * (2 * sum(offloaded) + sum(carried.values()))
    return Judged(stages, tuple(peaks), seconds, once, moved)


def _streaming(profile: Profile, streamed: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes over the host link, and on the device, of each block whose weights stream."""
    if not streamed:
        return {}, {}
    streams = saving_costs(
        profile.blocks,
        [0.0] * len(profile.blocks),
        stream=("frozen", "trainable"),
        training=profile.training,
        optimizer_on_host=True,
    )
    carried = {block: int(streams.carried[block]) for block in streamed}
    return carried, {block: int(streams.staged[block]) for block in streamed}


def seconds_of(
    profile: Profile,
    assignment: Sequence[int],
    root: int,
    devices: Sequence[Device],
    crossings: Sequence[Crossing],
    *,
    schedule: str,
    micro_batches: int,
) -> float:
    """Seconds of a step of an assignment whose blocks keep what they save, without a look at memory.

    Example:
        >>> seconds_of(profile, [0, 0, 1], 1, devices, crossings, schedule="1f1b", micro_batches=8)

    Args:
        profile, assignment, root, devices, crossings, schedule, micro_batches: as for `judge`.
    """
    places = [device for _, _, device in runs_of(assignment)]
    order = launch_order(schedule, len(places), micro_batches, devices=places, training=profile.training)
    stages = stages_of(profile, assignment, root, devices, crossings)
    return _seconds(profile, stages, order, micro_batches, devices)


def launched(
    profile: Profile,
    stages: Sequence[Stage],
    order: Sequence[Launch],
    micro_batches: int,
    saving: Sequence[str] = (),
    streamed: Sequence[int] = (),
    on_host: Sequence[int] = (),
) -> Timeline:
    """Storage events of a step in the order of its launches.

    Example:
        >>> launched(profile, plan.stages, order, plan.micro_batches, plan.saving)

    Args:
        profile: of one micro-batch.
        stages: of the assignment.
        order: launches.
        micro_batches: how many there are.
        saving, streamed: as for `judge`.
        on_host: blocks whose optimizer runs on the host.
    """
    timeline = profile.timeline
    if streamed or on_host:
        timeline = with_host(timeline, optimizer=on_host, weights=streamed)
    if any(word != "keep" for word in saving):
        timeline = with_savings(timeline, saving)
    if micro_batches == 1:
        return timeline
    return interleaved(timeline, len(profile.blocks), [(stage.start, stage.stop) for stage in stages], order)


def _shares(
    profile: Profile, stages: Sequence[Stage], away: Sequence[int], micro_batches: int, devices: Sequence[Device]
) -> list[float]:
    """Seconds that each micro-batch of a stage bears of its optimizer on the host."""
    sharing, on_host = sharing_of(micro_batches, len(devices)), set(away)
    shares = []
    for stage in stages:
        rows = [profile.blocks[block] for block in stage.blocks if block in on_host]
        shares.append(host_optimizer_of(rows, devices[stage.device].host_link, sharing=sharing).seconds / micro_batches)
    return shares


def _seconds(
    profile: Profile, stages: Sequence[Stage], order: Sequence[Launch], micro_batches: int, devices: Sequence[Device]
) -> float:
    on_host = micro_batches * launch_seconds(profile, devices)
    places = [stage.device for stage in stages]
    is_plain = len(set(places)) == len(places) and not any(stage.holds for stage in stages)
    by_formula = step_seconds(stages, micro_batches, on_host / micro_batches)
    if micro_batches == 1 or (is_plain and on_host < _BUSY_HOST * by_formula):
        return by_formula
    # Where stages visit a device more than once, or devices wait for the host, no formula knows how they interlock.
    by_clock = max(slot.stop for slot in clocked(stages, order))
    return max(by_clock, by_formula) if is_plain else max(by_clock, on_host)
