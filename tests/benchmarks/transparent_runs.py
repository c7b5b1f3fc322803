"""Random models, split and run in parts, beside the same models whole on one device."""

from __future__ import annotations

import gc
import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autobalance.errors import InfeasiblePlanError
from autobalance.execution.seeds import glue_seed, step_seed, visit_seed
from autobalance.partitioning.plan import Plan
from autobalance.placement.pairs import check_pairs
from autobalance.profiling.profiler import Profiler
from autobalance.simulated import simulate
from autobalance.strategy.planning import best_plan, checked
from autobalance.strategy.planning.checked import searched
from tests.models import loader
from tests.random_models import Recipe, draw_recipe, fields_of

STEPS = 20


@dataclass(frozen=True)
class Case:
    """One model under one plan.

    Attributes:
        recipe: of the model.
        schedule: one of `SCHEDULES`.
        devices: how many.
        assignment: device of each block.
        micro_batches: parts of each batch.
        saving: what each block does with what it saves for the backward, as `Plan.saving` has it.
        streamed: blocks whose weights are on the host.
        host_optimizer: devices whose optimizer state is on the host.
        budget: None, or the planner decides all that, where each device has this share of what one would need.
    """

    recipe: Recipe
    schedule: str
    devices: int
    assignment: tuple[int, ...]
    micro_batches: int
    saving: tuple[str, ...] = ()
    streamed: tuple[int, ...] = ()
    host_optimizer: tuple[int, ...] = ()
    budget: float | None = None

    @property
    def is_seeded(self) -> bool:
        """Whether masks are those of parts, and not of the whole batch."""
        return self.recipe.dropout > 0 and self.micro_batches > 1

    @property
    def saves(self) -> bool:
        """Whether anything is recomputed or on the host, or may be."""
        return self.budget is not None or bool({*self.saving} - {"keep"} or self.streamed or self.host_optimizer)

    @property
    def shares(self) -> bool:
        """Whether blocks are called more than once, or share weights."""
        called = Counter(step.block for step in self.recipe.steps if step.block is not None)
        return bool(self.recipe.tied) or max(called.values()) > 1

    @property
    def pins(self) -> dict[str, int]:
        """Device by the name of each block."""
        return dict(zip(self.recipe.block_names, self.assignment, strict=True))

    def __str__(self) -> str:
        where = f"blocks on {self.assignment}" if self.budget is None else f"planned for {self.budget:.0%} a device"
        words = [f"{index} {word}s" for index, word in enumerate(self.saving) if word != "keep"]
        words += [f"{index} streams" for index in self.streamed]
        words += [f"optimizer of device {device} on the host" for device in self.host_optimizer]
        return ", ".join(
            [
                f"seed {self.recipe.seed}",
                self.schedule,
                f"{self.micro_batches} parts of {self.recipe.samples} on {self.devices} devices",
                where,
                *words,
            ]
        )

    def imposed(self, plan: Plan) -> Plan:
        """The plan, with what the case says of memory that is saved."""
        return replace(plan, saving=self.saving, streamed=self.streamed, host_optimizer=self.host_optimizer)


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
    saves, tied = draw.random() < 0.3, {block for pair in recipe.tied for block in pair}
    words = ("keep", "keep", "recompute", "offload") if saves else ("keep",)
    return Case(
        recipe,
        schedule,
        devices,
        tuple(assignment),
        1 if schedule == "naive" else draw.randint(2, recipe.samples),
        saving=tuple(draw.choice(words) for _ in range(blocks)),
        streamed=tuple(block for block in range(blocks) if saves and block not in tied and draw.random() < 0.15),
        host_optimizer=tuple(device for device in range(devices) if saves and draw.random() < 0.15),
        budget=draw.choice([0.6, 0.75, 0.9]) if draw.random() < 0.2 and schedule != "looped" else None,
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
    options = {"schedule": case.schedule, "micro_batches": case.micro_batches}
    if case.budget is None:
        with mock.patch.object(checked, "searched", lambda *asked: case.imposed(searched(*asked))):
            return fit(case.recipe, package, case.devices, steps, pin=case.pins, recompute=False, **options)
    (whole,) = fit(case.recipe, package, 1, 1, **options, recompute=False).peaks
    for more in range(20):  # the largest block may need more than its share
        budgets = [int(whole * (case.budget + 0.1 * more))] * case.devices
        try:
            return fit(case.recipe, package, budgets, steps, recompute=True, offload=True, **options)
        except InfeasiblePlanError:
            continue
    raise AssertionError("no budget is enough")


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
    count = devices if isinstance(devices, int) else len(devices)
    with simulate(count):  # once a process, patterns go from each device to each, which these tiny models do not hide
        check_pairs(torch.device("simulated", index) for index in range(count))
    with simulate(devices):
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
        with _profiled_once(recipe):
            trainer.fit(model, loader(recipe.batches(steps)))
        run.plan = trainer.strategy.plan
        run.peaks = [torch.simulated.max_memory_allocated(index) for index in range(count)]
    return run


_profiles: dict[tuple[int, str], Any] = {}


@contextmanager
def _profiled_once(recipe: Recipe) -> Iterator[None]:
    """Take a model's profile from its run before: it depends on no plan, and takes longer than all else."""
    profile, for_any_batch = Profiler.profile, best_plan.for_any_batch

    def known(what: str, make: Callable[[], Any]) -> Any:
        if (recipe.seed, what) not in _profiles:
            for key in [key for key in _profiles if key[0] != recipe.seed]:
                del _profiles[key]
            _profiles[recipe.seed, what] = make()
        return _profiles[recipe.seed, what]

    with (
        mock.patch.object(Profiler, "profile", lambda self: known("profile", partial(profile, self))),
        mock.patch.object(
            best_plan, "for_any_batch", lambda *asked: known("any batch", partial(for_any_batch, *asked))
        ),
    ):
        yield


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


def run_by_hand(case: Case, steps: int = STEPS, coins: int | None = None) -> Run:
    """Train in as many parts, one after the other, in a plain loop that seeds as `autobalance.execution.seeds` says.

    Nothing is recomputed.

    Example:
        >>> run_by_hand(draw_case(7, "1f1b")).losses

    Args:
        case: what and how.
        steps: optimizer steps.
        coins: as for `run_whole`.
    """
    steps_kept = tuple(replace(step, checkpointed=False) for step in case.recipe.steps)
    recipe = replace(case.recipe, steps=steps_kept)
    with simulate(1):
        on = torch.device("simulated", 0)
        run, model = Run(parts=case.micro_batches), _nudged(recipe.make(), recipe, coins).to(on)
        optimizer = model.configure_optimizers()
        seeds = _Seeds(model.blocks)
        torch.manual_seed(recipe.seed)
        for index, batch in enumerate(recipe.batches(steps)):
            optimizer.zero_grad()
            seed, losses = step_seed(index), []
            for number, part in enumerate(_parts(batch, recipe.samples, case.micro_batches)):
                share = _share(recipe, part, batch)
                with seeds.of(seed, number), torch.autocast(on.type, torch.bfloat16, enabled=recipe.autocast):
                    loss = share * model.training_step(tree_map_only(Tensor, lambda tensor: tensor.to(on), part), 0)
                loss.backward()
                losses.append(float(loss.detach()))
            if not run.losses:
                run.keep_gradients(model)
            run.losses.append(sum(losses))
            optimizer.step()
    return run


def _parts(batch: Any, samples: int, count: int) -> list[Any]:
    return [
        tree_map_only(Tensor, lambda tensor, of=part: tensor[of[0] : of[-1] + 1], batch)
        for part in torch.arange(samples).tensor_split(count)
    ]


def _share(recipe: Recipe, part: Any, batch: Any) -> float:
    """What the loss of a part counts for."""
    mine, all_of_them = fields_of(part)[3], fields_of(batch)[3]
    if recipe.reduction == "weighted":
        return float(mine.sum() / all_of_them.sum())
    return 1.0 if recipe.reduction == "sum" else len(mine) / len(all_of_them)


class _Seeds:
    """Seeds visits of blocks, and what is drawn between them."""

    def __init__(self, blocks: Iterable[torch.nn.Module]) -> None:
        self._step = self._number = 0
        self._visits: Counter[str] = Counter()
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, f"blocks.{index}"))
            block.register_forward_hook(self._leave)

    @contextmanager
    def of(self, step: int, number: int) -> Iterator[None]:
        """A part of a step runs inside."""
        self._step, self._number = step, number
        self._visits.clear()
        before = torch.get_rng_state()
        torch.manual_seed(glue_seed(step, number))
        yield
        torch.set_rng_state(before)

    def _enter(self, name: str, *arguments: object) -> None:
        self._between = torch.get_rng_state()
        torch.manual_seed(visit_seed(self._step, name, self._visits[name], self._number))
        self._visits[name] += 1

    def _leave(self, *arguments: object) -> None:
        torch.set_rng_state(self._between)


def run_whole(recipe: Recipe, steps: int = STEPS, coins: int | None = None) -> Run:
    """Train in a plain loop, whole batches on one device: the host, or a simulated one if it computes in bfloat16.

    Example:
        >>> run_whole(draw_recipe(7)).losses

    Args:
        recipe: of the model.
        steps: optimizer steps.
        coins: seed of the coins by which every weight is larger or smaller than the recipe's, by one rounding; None:
            they are the recipe's.
    """
    with simulate(1):
        # Kernels that draw random numbers, and those that autocast casts for, are others on the host.
        on = torch.device("simulated", 0) if recipe.autocast or recipe.dropout else torch.device("cpu")
        run, model = Run(parts=1), _nudged(recipe.make(), recipe, coins).to(on)
        optimizer = model.configure_optimizers()
        torch.manual_seed(recipe.seed)
        for batch in recipe.batches(steps):
            with torch.autocast(on.type, dtype=torch.bfloat16, enabled=recipe.autocast):
                loss = model.training_step(tree_map_only(Tensor, lambda tensor: tensor.to(on), batch), 0)
            optimizer.zero_grad()
            loss.backward()
            if not run.losses:
                run.keep_gradients(model)
            run.losses.append(float(loss.detach()))
            optimizer.step()
    return run


def _nudged(model: Any, recipe: Recipe, coins: int | None) -> Any:
    """Make every weight larger or smaller by one rounding in the precision that it is computed with."""
    if coins is None:
        return model
    share = torch.finfo(torch.bfloat16 if recipe.autocast else torch.float32).eps
    generator = torch.Generator().manual_seed(coins)
    with torch.no_grad():
        for parameter in model.parameters():
            heads = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.mul_(torch.where(heads, 1 + share, 1 - share))
    return model
