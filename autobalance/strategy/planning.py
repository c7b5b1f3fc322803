"""From the Trainer's run to its plan: sample batches, a trial, the search, and a trial of what it found."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from autobalance.blocks import find_blocks
from autobalance.compat import data_owners, loader_attachment_kept
from autobalance.devices.detect import detect_devices
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.search import plan as search
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch
from autobalance.strategy.loaders import elements_in, sample_batches
from autobalance.strategy.options import Options
from autobalance.strategy.placed import Placed
from autobalance.strategy.trial import LightningTrial
from autobalance.strategy.undisturbed import undisturbed

# The trial of a plan, as placed, may stand above the replay that found it. Each round takes that into account.
_MOST_ROUNDS = 4


def read_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The user's own plan, given or on disk."""
    return Plan.load(plan) if isinstance(plan, (str, Path)) else plan


def plan_run(
    trainer: Any, options: Options, devices: Sequence[torch.device], given: Plan | None, before: Placed | None
) -> Placed:
    """The plan of the Trainer's present run.

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`, its model on the host.
        options: how to plan.
        devices: the Trainer's devices.
        given: the user's own plan.
        before: what was placed in the last run; its plan is kept if it covers this one.

    Returns:
        The plan, with nothing placed.

    Raises:
        ValueError: if the user's plan is for another number of devices.
        InfeasiblePlanError: if no plan fits.
    """
    module = trainer.lightning_module
    training = trainer.state.fn == "fit"
    if given is not None:
        if len(given.devices) != len(devices):
            raise ValueError(
                f"the plan is for {len(given.devices)} devices, but the Trainer has {len(devices)}: set "
                f"Trainer(devices={len(given.devices)}), or make a plan for {len(devices)}."
            )
        return before if before is not None else Placed(weakref.ref(module), given, training, None)
    with undisturbed(module, trainer.datamodule, *data_owners(trainer)), loader_attachment_kept(trainer):
        batches = sample_batches(trainer, options)
        elements = max((elements_in(batch.data) for batch in batches), default=0)
        if before is not None and before.covers(module, training, elements):
            return before
        try:
            plan = _make_plan(trainer, options, devices, batches)
        except InfeasiblePlanError as error:
            raise _with_note_on_notebooks(error, devices) from None
    return Placed(weakref.ref(module), plan, training, elements)


def as_devices(devices: Sequence[torch.device]) -> tuple[Device, ...]:
    """The Trainer's devices as the planner sees them, with the memory that is free for this run.

    Args:
        devices: CUDA, simulated or CPU devices; a CPU device stands for an equal share of the host's free memory.
    """
    kind = devices[0].type
    if kind == "cuda":
        return detect_devices([device.index or 0 for device in devices])
    if kind == "cpu":
        free = psutil.virtual_memory().available // len(devices)
        return tuple(Device(f"cpu ({index})", free) for index in range(len(devices)))
    backend = torch.get_device_module(kind)
    return tuple(Device(str(device), backend.mem_get_info(device)[0]) for device in devices)


def _make_plan(trainer: Any, options: Options, devices: Sequence[torch.device], batches: Sequence[Batch]) -> Plan:
    module = trainer.lightning_module
    profiler = Profiler(module, find_blocks(module), LightningTrial(trainer), batches, trainer.state.fn == "fit")
    profile, targets = profiler.profile(), as_devices(devices)
    excess = (0,) * len(targets)
    for _ in range(_MOST_ROUNDS):
        plan = _search(profile, targets, options, excess)
        forecast = _forecast(profiler, plan)
        if all(peak <= budget for peak, budget in zip(forecast, plan.budgets, strict=True)):
            return plan.with_peaks(forecast, notes=[note for note in profiler.notes if note not in plan.notes])
        over = (peak - replayed for peak, replayed in zip(forecast, plan.peaks, strict=True))
        excess = tuple(max(known, new) for known, new in zip(excess, over, strict=True))
    raise InfeasiblePlanError(
        f"no plan was found in {_MOST_ROUNDS} rounds whose trial stays within the budgets; the last one needs {forecast} bytes "
        f"of {plan.budgets}. A smaller batch or more devices would help.",
        need=tuple(forecast),
        budget=plan.budgets,
    )


def _search(profile: Profile, targets: Sequence[Device], options: Options, excess: Sequence[int]) -> Plan:
    return search(
        profile,
        targets,
        policy=options.policy,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        max_memory=options.max_memory,
        reserve=options.reserve,
        pin=options.pin,
        recompute=options.recompute,
        offload=options.offload,
        excess=excess,
    )


def _forecast(profiler: Profiler, plan: Plan) -> list[int]:
    """Peaks per device of a trial with the plan's placement installed."""
    forecasts = profiler.forecast(plan.block_names, plan.assignment, plan.device_map, plan.root, len(plan.devices))
    return [forecast.peak for forecast in forecasts]


def _with_note_on_notebooks(error: InfeasiblePlanError, devices: Sequence[torch.device]) -> InfeasiblePlanError:
    """Say so if Lightning's own choice of one GPU in a notebook is why nothing fits."""
    there = torch.cuda.device_count()
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if len(devices) > 1 or devices[0].type != "cuda" or there < 2 or not interactive:
        return error
    return InfeasiblePlanError(
        f"{error} In a notebook Trainer(devices='auto') takes one GPU of {there}: set devices={there}.",
        need=error.need,
        budget=error.budget,
        largest_block=error.largest_block,
    )
