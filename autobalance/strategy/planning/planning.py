"""The plan of the Trainer's run: the user's own, the last run's, or the best for batches of the user's own loaders."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autobalance.blocks import find_blocks
from autobalance.compat import data_owners, loader_attachment_kept
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.agreement import (
    batch_elements,
    refuse_larger_batch,
    refuse_other_devices,
    refuse_other_weights,
)
from autobalance.partitioning.plan import Plan
from autobalance.placement.agreement import memory_of, weights_held
from autobalance.placement.contents import elements_in
from autobalance.profiling.signature import signature_of
from autobalance.strategy.options import Options
from autobalance.strategy.placed import Placed
from autobalance.strategy.planning.best_plan import best_plan
from autobalance.strategy.planning.loaders import sample_batches
from autobalance.strategy.planning.undisturbed import undisturbed


def read_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The user's own plan, given or on disk.

    Args:
        plan: one, or the file of one.
    """
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
        ValueError: if the user's plan is for another model, a smaller batch or other devices.
        InfeasiblePlanError: if no plan fits.
    """
    module = trainer.lightning_module
    training = trainer.state.fn == "fit"
    if given is not None:
        if before is not None:
            return before
        _check_given(trainer, options, devices, given)
        return Placed(weakref.ref(module), given, training, batch_elements(given) or None)
    with undisturbed(module, trainer.datamodule, *data_owners(trainer)), loader_attachment_kept(trainer):
        batches = sample_batches(trainer, options)
        elements = max((elements_in(batch.data) for batch in batches), default=0)
        if before is not None and before.covers(module, training, elements):
            return before
        try:
            plan = best_plan(trainer, options, devices, batches)
        except InfeasiblePlanError as error:
            raise _with_note_on_notebooks(error, devices) from None
    return Placed(weakref.ref(module), plan, training, elements)


def _check_given(trainer: Any, options: Options, devices: Sequence[torch.device], given: Plan) -> None:
    """Refuse the user's own plan where it is not for this model, its batches and these devices."""
    if len(given.devices) != len(devices):
        raise ValueError(
            f"the plan is for {len(given.devices)} devices, but the Trainer has {len(devices)}: set "
            f"Trainer(devices={len(given.devices)}), or make a plan for {len(devices)}."
        )
    refuse_other_devices(given, [(str(device), memory_of(device)) for device in devices])
    module = trainer.lightning_module
    refuse_other_weights(given, weights_held(module, find_blocks(module).ordered(given.block_names), given))
    if not batch_elements(given):
        return
    with undisturbed(module, trainer.datamodule, *data_owners(trainer)), loader_attachment_kept(trainer):
        batches = sample_batches(trainer, options)
        if batches:
            largest = max(batches, key=lambda batch: elements_in(batch.data))
            refuse_larger_batch(given, signature_of(largest.data))


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
