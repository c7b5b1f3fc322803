"""The best plan for the Trainer's run: profiled by a trial, searched, and checked by a trial of its placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import psutil
import torch

from autobalance.blocks import find_blocks
from autobalance.devices.detect import detect_devices
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.execution.batches.by_hook import parts_by_hook
from autobalance.execution.batches.merging import UnmergeableError
from autobalance.execution.batches.sample_layout import UnsplittableBatchError
from autobalance.kernels.present import present_gpu
from autobalance.kernels.target import find_target
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.times import launch_seconds
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch
from autobalance.report.progress import ProgressBar
from autobalance.simulated import device_at
from autobalance.strategy.options import Options
from autobalance.strategy.parts.splittable import in_words
from autobalance.strategy.planning.batch_sizes import for_any_batch
from autobalance.strategy.planning.checked import checked_plan, searched
from autobalance.strategy.planning.ragged import host_twin, on_host, plan_in_parts
from autobalance.strategy.planning.ways import Way, choice_for
from autobalance.strategy.summary import tell
from autobalance.strategy.trials.trial import STEPS, LightningTrial


def best_plan(
    trainer: Any,
    options: Options,
    devices: Sequence[torch.device],
    batches: Sequence[Batch],
    targets: Sequence[Device] | None = None,
) -> Plan:
    """Profile the Trainer's module, and search the best plan whose installed trace keeps every budget.

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
        options: how to plan.
        devices: the Trainer's devices.
        batches: one of every loader the run will meet, training first.
        targets: what the devices can hold, where that is not what is free on them now.

    Returns:
        The plan; its peaks are those of the trace with the placement installed.

    Raises:
        InfeasiblePlanError: if no plan fits.
    """
    module = trainer.lightning_module
    blocks, trial = find_blocks(module), LightningTrial(trainer)
    shown = trainer.progress_bar_callback is not None
    with ProgressBar("profiling", total=STEPS * len(blocks)) if shown else nullcontext() as progress:
        profiler = Profiler(
            module,
            blocks,
            trial,
            batches,
            training=trainer.state.fn == "fit",
            target=find_target("cuda" if devices[0].type == "cuda" else "simulated", present_gpu()),
            progress=progress,
        )
        profile, targets = profiler.profile(), targets or planned_devices(devices)
        if not batches or not options.may_split or not _gains_by_micro_batches(profile, targets, options):
            return checked_plan(profiler, profile, targets, options)
        twin = host_twin(trainer)
        choice = choice_for(trainer, options, on_host(twin, batches[0]), len(targets), trial)
        if choice.way is Way.WINDOW:
            return _plan_for_windows(profiler, trial, profile, targets, options)
        found: Plan | str = choice.why
        if choice.way is Way.PARTS:
            found = _plan_for_parts(trainer, twin, profiler, profile, targets, options)
        if isinstance(found, Plan):
            return found
        tell(trainer, found)
        return checked_plan(profiler, profile, targets, options.whole)


def _gains_by_micro_batches(profile: Profile, devices: Sequence[Device], options: Options) -> bool:
    """Whether a plan with micro-batches is asked for, or may be better: what they take costs more traces."""
    if (options.schedule, options.micro_batches) != ("auto", "auto"):
        return True
    try:
        whole = searched(profile, devices, options)
    except InfeasiblePlanError:
        return True
    # The host launches as many kernels for a part as for the whole, and each part comes after the one before.
    return options.policy == "auto" and whole.step_time > 2 * launch_seconds(profile, devices)


def _plan_for_parts(
    trainer: Any, twin: Any, profiler: Profiler, profile: Profile, devices: Sequence[Device], options: Options
) -> Plan | str:
    """The best plan that splits batches where that is better, or why none can be made, in words."""
    try:
        is_by_hook = parts_by_hook(twin, on_host(twin, profiler.batches[0]), 2) is not None
        scaled = profile if is_by_hook else for_any_batch(profiler, profile)
        if not scaled.is_scalable and scaled.batch_size:  # its samples are coupled, or few of them take another way
            return in_words([scaled.notes[-1]])
        if not scaled.is_scalable:
            found = plan_in_parts(trainer, twin, profiler, profile, devices, options)
            return found if isinstance(found, Plan) else in_words([found])
        asked = options.micro_batches
        if isinstance(asked, int) and asked > scaled.batch_size:
            return in_words([f"{asked} parts are more than the {scaled.batch_size} samples of a batch"])
        return checked_plan(profiler, scaled, devices, options)
    except InfeasiblePlanError:
        raise
    except Exception as error:  # whatever the user's step raises where a part has few samples
        if not isinstance(error, (UnmergeableError, UnsplittableBatchError)) and not _comes_from_step(error):
            raise
        said = str(error).strip().split("\n")[0].rstrip(".")
        return in_words([f"the step does not run on parts of a batch ({type(error).__name__}: {said})"])


def _comes_from_step(error: BaseException) -> bool:
    """Whether an error was raised by a step or hook of the user's, and not by what plans for it."""
    return any(
        frame.f_code.co_name in _STEPS and "autobalance" not in frame.f_globals.get("__name__", "").split(".")
        for frame, _ in walk_tb(error.__traceback__)
    )


_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step", "split_batch", "loss_weight"})


def _plan_for_windows(
    profiler: Profiler, trial: LightningTrial, profile: Profile, devices: Sequence[Device], options: Options
) -> Plan:
    """The best plan that overlaps the batches of a window, or takes them one by one where that is asked for nowhere,
    and is as fast or all that fits."""
    trial.takes_windows = True
    is_asked_for = options.micro_batches == "accumulate"
    try:
        found = checked_plan(profiler, profiler.profile(), devices, options, window=trial.window)
    except InfeasiblePlanError:
        if is_asked_for:
            raise
        found = None
    if found is not None and (is_asked_for or found.step_time < trial.window * _whole_time(profile, devices, options)):
        return found
    trial.takes_windows = False
    return checked_plan(profiler, profile, devices, options.whole)


def _whole_time(profile: Profile, devices: Sequence[Device], options: Options) -> float:
    """Seconds of a step that takes batches whole; infinite where that does not fit."""
    try:
        return searched(profile, devices, options.whole).step_time
    except InfeasiblePlanError:
        return math.inf


def planned_devices(devices: Sequence[torch.device]) -> list[Device]:
    """What the Trainer's devices can hold now.

    Args:
        devices: of one type; those of the CPU share the host's memory equally, and simulated ones are as fast as they
            were configured.
    """
    if devices[0].type == "cuda":
        return list(detect_devices([device.index or 0 for device in devices]))
    host = psutil.virtual_memory()
    if devices[0].type == "cpu":
        return [Device(f"cpu:{index}", host.available // len(devices)) for index in range(len(devices))]
    backend = torch.get_device_module(devices[0])
    free = [min(backend.mem_get_info(device)[0], host.total) for device in devices]
    configured = [device_at(device.index or 0) for device in devices]
    names = {one.name: str(device) for one, device in zip(configured, devices, strict=True)}
    return [
        replace(
            one,
            name=str(device),
            capacity=bytes_free,
            links=tuple((names.get(other, other), rate) for other, rate in one.links),
        )
        for one, device, bytes_free in zip(configured, devices, free, strict=True)
    ]
