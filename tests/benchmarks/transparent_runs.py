"""Random models, split and run in parts, beside the same models whole on one device."""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autobalance.errors import InfeasiblePlanError
from autobalance.simulated import simulate
from tests.models import loader
from tests.random_models import Recipe, draw_recipe

STEPS = 20
TIGHT = (0.8, 0.9, 0.96)
"""Budgets that are tried where blocks are to save memory, as shares of what the plan takes that saves none."""


@dataclass(frozen=True)
class Case:
    """One model under one plan.

    Attributes:
        recipe: of the model.
        schedule: one of `SCHEDULES`.
        devices: how many.
        assignment: device of each block.
        micro_batches: parts of each batch.
        recomputes, offloads: what blocks may do to save memory; budgets are then so tight that some have to.
    """

    recipe: Recipe
    schedule: str
    devices: int
    assignment: tuple[int, ...]
    micro_batches: int
    recomputes: bool = False
    offloads: bool = False

    @property
    def pins(self) -> dict[str, int]:
        """Device by the name of each block."""
        return dict(zip(self.recipe.block_names, self.assignment, strict=True))

    def __str__(self) -> str:
        saving = "".join(f", {word}" for word in ("recomputes", "offloads") if getattr(self, word))
        return (
            f"seed {self.recipe.seed}, {self.schedule}, {self.micro_batches} parts of {self.recipe.samples}, "
            f"blocks on {self.assignment}{saving}"
        )


def draw_case(seed: int, schedule: str) -> Case:
    """A random model, and a random plan for it.

    Example:
        >>> draw_case(7, "1f1b").assignment

    Args:
        seed: any; the same model for every schedule.
        schedule: one of `SCHEDULES`.
    """
    recipe, draw = draw_recipe(seed), random.Random(f"{seed} {schedule}")
    blocks, devices = len(recipe.blocks), draw.randint(2, 4)
    if schedule == "looped":
        devices = min(devices, blocks // 2)
        assignment = [chunk % devices for chunk in _contiguous(draw, blocks, 2 * devices)]
    elif draw.random() < 0.5:
        assignment = _contiguous(draw, blocks, devices)
    else:
        assignment = [draw.randrange(devices) for _ in range(blocks)]
    for first, second in recipe.tied:
        assignment[second] = assignment[first]
    return Case(
        recipe,
        schedule,
        devices,
        tuple(assignment),
        1 if schedule == "naive" else draw.randint(2, recipe.samples),
        recomputes=draw.random() < 0.25,
        offloads=draw.random() < 0.1,
    )


def _contiguous(draw: random.Random, blocks: int, parts: int) -> list[int]:
    """Which of consecutive parts each block is in; no part is empty if there are as many blocks."""
    cuts = sorted(draw.sample(range(1, blocks), min(parts, blocks) - 1))
    return [sum(cut <= block for cut in cuts) for block in range(blocks)]


@dataclass
class Run:
    """What training showed.

    Attributes:
        losses: of each step.
        gradients: of the first step, by parameter.
        parts: calls of `training_step` for each batch.
        plan: the plan; None without one.
        peaks: most bytes at once on each device.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parts: int = 0
    plan: Any = None
    peaks: list[int] = field(default_factory=list)

    def keep_gradients(self, model: torch.nn.Module) -> None:
        """Keep those that the parameters have now."""
        self.gradients = {
            name: parameter.grad.to("cpu").double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


def run_split(case: Case, package: str = "lightning.pytorch", steps: int = STEPS) -> Run:
    """Train by the Trainer on simulated devices.

    Example:
        >>> run_split(draw_case(7, "1f1b")).losses

    Args:
        case: what and how.
        package: the Lightning package.
        steps: optimizer steps.
    """
    options: dict[str, Any] = {"pin": case.pins, "schedule": case.schedule, "micro_batches": case.micro_batches}
    if not case.recomputes and not case.offloads:
        return fit(case.recipe, package, case.devices, steps, **options, recompute=False)
    free = fit(case.recipe, package, case.devices, 1, **options, recompute=False).plan
    for share in TIGHT:
        budgets = {device: int(share * peak) for device, peak in enumerate(free.peaks)}
        try:
            return fit(
                case.recipe,
                package,
                list(budgets.values()),
                steps,
                **options,
                recompute=case.recomputes,
                offload=case.offloads,
                max_memory=budgets,
            )
        except InfeasiblePlanError:
            continue
    return fit(case.recipe, package, list(free.peaks), steps, **options, recompute=False)


def run_on_one(case: Case, package: str = "lightning.pytorch", steps: int = STEPS) -> Run:
    """Train in as many parts, one after the other on one device.

    Example:
        >>> run_on_one(draw_case(7, "1f1b")).losses

    Args:
        case: what and how.
        package: the Lightning package.
        steps: optimizer steps.
    """
    return fit(case.recipe, package, 1, steps, schedule="1f1b", micro_batches=case.micro_batches, recompute=False)


def fit(recipe: Recipe, package: str, devices: int | Sequence[int], steps: int, **options: Any) -> Run:
    """Train a random model by the strategy.

    Example:
        >>> fit(draw_recipe(7), "lightning.pytorch", 2, steps=20).plan

    Args:
        recipe: of the model.
        package: the Lightning package.
        devices: how many simulated ones, or bytes of each.
        steps: optimizer steps.
        options: of the strategy.
    """
    lightning = importlib.import_module(package)
    from autobalance import SelfBalanceStrategy

    gc.collect()
    run = Run()
    model = recipe.make(lightning.LightningModule)
    model.__class__ = _counting(type(model), run)
    with simulate(devices):
        count = devices if isinstance(devices, int) else len(devices)
        trainer = lightning.Trainer(
            accelerator="simulated",
            devices=count,
            strategy=SelfBalanceStrategy(**options),
            precision="bf16-mixed" if recipe.autocast else "32-true",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[_keeping(lightning.Callback, run, recipe.seed)],
        )
        trainer.fit(model, loader(recipe.batches(steps)))
        run.plan = trainer.strategy.plan
        run.peaks = [torch.simulated.max_memory_allocated(index) for index in range(count)]
    return run


def _counting(base: type, run: Run) -> type:
    class Counting(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            run.parts += 1
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss

    return Counting


def _keeping(base: type, run: Run, seed: int) -> Any:
    class Keeping(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            run.parts = 0
            if index == 0:
                torch.manual_seed(seed)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.global_step == 0:
                run.keep_gradients(module)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            run.losses.append(float(outputs["loss"]))

    return Keeping()


def run_whole(recipe: Recipe, steps: int = STEPS) -> Run:
    """Train in a plain loop, whole batches on one device: the host, or a simulated one if it computes in bfloat16.

    Example:
        >>> run_whole(draw_recipe(7)).losses

    Args:
        recipe: of the model.
        steps: optimizer steps.
    """
    with simulate(1):
        # Kernels that draw random numbers, and those that autocast casts for, are others on the host.
        on = torch.device("simulated", 0) if recipe.autocast or recipe.dropout else torch.device("cpu")
        run, model = Run(parts=1), recipe.make().to(on)
        optimizer = model.configure_optimizers()
        torch.manual_seed(recipe.seed)
        for batch in recipe.batches(steps):
            with torch.autocast(on.type, dtype=torch.bfloat16, enabled=recipe.autocast):
                loss = model.training_step(tree_map_only(Tensor, lambda tensor: tensor.to(on), batch), 0)
            optimizer.zero_grad()
            loss.backward()
            if not run.losses:
                run.keep_gradients(model)
            run.losses.append(float(loss))
            optimizer.step()
    return run
