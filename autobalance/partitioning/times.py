"""Predicted times: of blocks on any device, of stages with what they receive, and of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from autobalance.devices.device import LAUNCH_TIME, Device
from autobalance.devices.links import link_matrix
from autobalance.devices.roofline import reference_rates
from autobalance.devices.table import find_gpu, recognise
from autobalance.partitioning.stage import Stage
from autobalance.partitioning.transfers import Crossing
from autobalance.partitioning.work_table import Seconds, WorkTable
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT
from autobalance.schedules.clock import Hold, Slot, run_clock
from autobalance.schedules.launches import Launch


def block_seconds(profile: Profile, device: Device, devices: Sequence[Device]) -> tuple[Seconds, Seconds]:
    """Seconds that every block takes on a device, forward and backward.

    Blocks whose work is known are timed by the roofline at the rates of the device (`devices/roofline.py`). Times
    given by hand hold for the fastest of all devices; others take longer in proportion to their float32 `flops`.

    Example:
        >>> forward, backward = block_seconds(profile, plan.devices[1], plan.devices)

    Args:
        profile: what the blocks cost.
        device: that the blocks run on.
        devices: all devices of the question.

    Returns:
        Two columns with one entry for each block.
    """
    return WorkTable(profile.blocks).seconds(device, devices)


def device_seconds(profile: Profile, devices: Sequence[Device]) -> tuple[tuple[Seconds, Seconds], ...]:
    """`block_seconds` for all devices at once; devices of one speed share their columns.

    Example:
        >>> [float(forward.sum()) for forward, _ in device_seconds(profile, plan.devices)]

    Args:
        profile: what the blocks cost.
        devices: K of them.

    Returns:
        K pairs of columns.
    """
    work = WorkTable(profile.blocks)
    known: dict[object, tuple[Seconds, Seconds]] = {}
    for device in devices:
        if device.speed not in known:
            known[device.speed] = work.seconds(device, devices)
    return tuple(known[device.speed] for device in devices)


def launch_seconds(profile: Profile, devices: Sequence[Device] = ()) -> float:
    """Seconds that the host needs to launch all kernels of one forward and backward, on whatever device they run.

    Example:
        >>> launch_seconds(profile)

    Args:
        profile: of one micro-batch.
        devices: of the question; the slowest launch among them counts. Empty: a usual host.
    """
    return launches_of(profile) * max((device.launch_time for device in devices), default=LAUNCH_TIME)


def launches_of(profile: Profile) -> int:
    """Kernels of one forward and backward, each of which the host launches.

    Example:
        >>> launches_of(profile)

    Args:
        profile: of one micro-batch.
    """
    return sum(part.launches for block in profile.blocks for part in (*block.forward_work, *block.backward_work))


def optimizer_seconds(profile: Profile, assignment: Sequence[int], devices: Sequence[Device]) -> tuple[float, ...]:
    """Seconds of the optimizer's step on every device, which works as fast as the device's memory is.

    Times of a traced profile hold for the GPU that it was made for, those given by hand for the fastest memory.

    Example:
        >>> max(optimizer_seconds(profile, plan.assignment, plan.devices))

    Args:
        profile: what the blocks cost.
        assignment: device index per block.
        devices: K of them.

    Returns:
        K times; devices work at once, so that the step takes the largest of them.
    """
    if find_gpu(profile.target) or recognise(profile.target) or any(block.forward_work for block in profile.blocks):
        bandwidth = reference_rates(profile.target).bandwidth
    else:
        bandwidth = max(device.bandwidth for device in devices)
    took = np.zeros(len(devices))
    np.add.at(took, np.asarray(assignment, dtype=np.int64), [block.optimizer_time for block in profile.blocks])
    return tuple((took * bandwidth / np.array([device.bandwidth for device in devices])).tolist())


def runs_of(assignment: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(start, stop, device) of every run of consecutive blocks with one device.

    Example:
        >>> runs_of([0, 0, 1, 0])
        ((0, 2, 0), (2, 3, 1), (3, 4, 0))

    Args:
        assignment: device of each block.
    """
    runs, start = [], 0
    for device, blocks in groupby(assignment):
        stop = start + sum(1 for _ in blocks)
        runs.append((start, stop, device))
        start = stop
    return tuple(runs)


def stages_of(
    profile: Profile,
    assignment: Sequence[int],
    root: int,
    devices: Sequence[Device],
    crossings: Sequence[Crossing],
    in_flight: Sequence[int] = (),
    saving: Sequence[str] = (),
    streamed: Mapping[int, int] | None = None,
) -> tuple[Stage, ...]:
    """Stages of an assignment with their times for one micro-batch.

    A tensor travels to each other device once, over the link from the device it comes from, and counts with the first
    stage there that takes it; in training the gradient of one that needs it comes back over the same link. What the
    root takes counts with the last stage where that is on its device, and else with the stage that sends it.

    Example:
        >>> stages_of(profile, [0, 0, 1], root=1, devices=devices, crossings=crossings_of(profile))

    Args:
        profile: of one micro-batch.
        assignment: device index per block.
        root: device index of batch and loss.
        devices: the devices of the question.
        crossings: tensors that go from block to block.
        in_flight: micro-batches whose saved bytes each stage holds; empty: one.
        saving: for each block `"keep"`, `"recompute"` (its forward runs once more, in the backward) or `"offload"` (its
            saved bytes go to the host and come back meanwhile). Empty: all are kept.
        streamed: block -> bytes that its weights, which stream, take over the link to the host, in all directions.

    Returns:
        One stage for each run of consecutive blocks with one device.
    """
    runs = runs_of(assignment)
    times = device_seconds(profile, devices)
    received, waits = _receive(profile.training, runs, assignment, root, devices, crossings)
    stages = []
    for number, (start, stop, device) in enumerate(runs):
        forward, backward = (float(column[start:stop].sum()) for column in times[device])
        modes = saving[start:stop]
        backward += sum(float(times[device][0][start + k]) for k, mode in enumerate(modes) if mode == "recompute")
        offloaded = sum((streamed or {}).get(block, 0) for block in range(start, stop))
        offloaded += 2 * sum(profile.blocks[start + k].saved for k, mode in enumerate(modes) if mode == "offload")
        # Copies to the host and back run beside all else, and only what they take longer is waited for.
        backward += max(0.0, offloaded / devices[device].host_link - forward - backward - waits[number])
        held = in_flight[number] if in_flight else 1
        holds = _holds(profile.waits, start, stop, device, root, times[device][0])
        launching = _launching(profile, range(start, stop), modes, devices[device].launch_time)
        times_of_stage = forward, backward, waits[number]
        stages.append(Stage(start, stop, device, held, *times_of_stage, received[number], holds, launching))
    return tuple(stages)


def _launching(
    profile: Profile, blocks: Sequence[int], modes: Sequence[str], launch_time: float
) -> tuple[float, float]:
    """Seconds that the host takes to launch the forwards of some blocks, and their backwards."""
    rows = [profile.blocks[block] for block in blocks]
    forward = [sum(part.launches for part in row.forward_work) for row in rows]
    backward = sum(part.launches for row in rows for part in row.backward_work)
    backward += sum(launches for launches, mode in zip(forward, modes, strict=False) if mode == "recompute")
    return sum(forward) * launch_time, backward * launch_time


def _holds(
    waits: Sequence[int], start: int, stop: int, device: int, root: int, forward: Seconds
) -> tuple[tuple[int, float], ...]:
    """Where in the forward of a stage the host waits, and for which device."""
    before = ((root, 0.0),) if start == 0 and ROOT in waits else ()
    inside = (block for block in waits if start <= block < stop)
    return before + tuple((device, float(forward[start : block + 1].sum())) for block in inside)


def _receive(
    training: bool,
    runs: Sequence[tuple[int, int, int]],
    assignment: Sequence[int],
    root: int,
    devices: Sequence[Device],
    crossings: Sequence[Crossing],
) -> tuple[list[int], list[float]]:
    """Bytes that every stage receives, gradients that go back for them too, and the seconds they take."""
    links = link_matrix(devices)
    stage_of = [number for number, (start, stop, _) in enumerate(runs) for _ in range(start, stop)]
    received, seconds = [0] * len(runs), [0.0] * len(runs)
    for crossing in crossings:
        source = root if crossing.source == ROOT else assignment[crossing.source]
        counted: dict[int, int] = {}  # device -> the stage that its copy counts with
        if ROOT in crossing.targets and crossing.source != ROOT:
            # The root works with the last stage, if that is on its device.
            counted[root] = len(runs) - 1 if runs[-1][2] == root else stage_of[crossing.source]
        for block in sorted(target for target in crossing.targets if target != ROOT):
            counted.setdefault(assignment[block], stage_of[block])
        ways = 2 if training and crossing.has_gradient else 1
        for device, stage in counted.items():
            if device != source:
                received[stage] += ways * crossing.nbytes
                seconds[stage] += ways * crossing.nbytes / float(links[source, device])
    return received, seconds


def clocked(stages: Sequence[Stage], order: Sequence[Launch]) -> tuple[Slot, ...]:
    """When what of a step runs on which device, in seconds from its begin.

    Example:
        >>> max(slot.stop for slot in clocked(plan.stages, launch_order("gpipe", len(plan.stages), 4)))

    Args:
        stages: with their times for one micro-batch.
        order: launches of all micro-batches.
    """
    return run_clock(
        order,
        [stage.device for stage in stages],
        [stage.forward_time for stage in stages],
        [stage.backward_time for stage in stages],
        [stage.receive_time for stage in stages],
        [[Hold(*hold) for hold in stage.holds] for stage in stages],
        [stage.launching for stage in stages],
    )


def step_seconds(stages: Sequence[Stage], micro_batches: int = 1, launch: float = 0.0) -> float:
    """Seconds of one step without the optimizer's: all stages once, then the longest for each further micro-batch.

    The host launches all kernels one after the other, which can take longer than the devices need. Source of
    the formula: Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed
    deep learning", OSDI 2022.

    Example:
        >>> step_seconds([Stage(0, 1, 0, forward_time=1.0), Stage(1, 2, 1, forward_time=2.0)], micro_batches=4)
        9.0

    Args:
        stages: with their times for one micro-batch.
        micro_batches: parts of the batch; 1 where stages run one at a time.
        launch: host seconds for the kernels of one micro-batch.
    """
    times = [stage.time for stage in stages]
    on_devices = sum(times) + (micro_batches - 1) * max(times, default=0.0)
    return max(on_devices, micro_batches * launch)
