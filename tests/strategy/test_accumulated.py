"""Batches whose gradients are added up flow together, and train, log and count as one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from threads import no_thread_left
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.strategy.split_runs import (
    CLASSES,
    WIDTH,
    Fitted,
    by_schedule,
    compare,
    data,
    fit,
    fit_alone,
    fit_split,
    in_turn,
    make,
    strategy_of,
)

pytestmark = pytest.mark.usefixtures("simulated")


def counting(lightning: ModuleType) -> Any:
    """A callback that keeps what each hook around a batch is told, and the counters there."""

    class Counting(lightning.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.rows: list[tuple[Any, ...]] = []
            self.values: list[float] = []

        def note(self, name: str, trainer: Any, batch_idx: int, *more: Any, values: Sequence[float] = ()) -> None:
            loop = trainer.fit_loop.epoch_loop
            self.values += [trainer.optimizers[0].param_groups[0]["lr"], *values]
            progress = loop.batch_progress.current
            counts = (progress.ready, progress.started, progress.processed, progress.completed)
            steps = loop.automatic_optimization.optim_progress.optimizer_steps
            self.rows.append((name, batch_idx, trainer.global_step, *counts, steps, *more))

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.note("start", trainer, batch_idx, batch[1].tolist())

        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            self.note("backward", trainer, -1, values=[float(loss.detach())])

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms = [float(parameter.grad.norm()) for parameter in module.parameters()]
            self.note("optimizer", trainer, -1, values=norms)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            labels, metrics = outputs["labels"].tolist(), trainer.callback_metrics
            values = [float(outputs["loss"]), *map(float, metrics.values())]
            self.note("end", trainer, batch_idx, batch[1].tolist(), labels, tuple(metrics), values=values)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.note("validation", trainer, trainer.fit_loop.epoch_loop.batch_idx)

    return Counting()


def model(lightning: ModuleType, **attributes: Any) -> Any:
    """A classifier with a schedule of its learning rate, that counts how often batches are transferred."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("number", float(batch_idx))
        return {"loss": loss, "labels": batch[1]}

    def on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        self.transferred = [*getattr(self, "transferred", []), ("before", tuple(batch[1].tolist()))]
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        self.transferred = [*self.transferred, ("after", tuple(batch[1].tolist()))]
        return [batch[0] + 1, batch[1]]

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]

    hooks = {each.__name__: each for each in (on_before_batch_transfer, on_after_batch_transfer)}
    steps = {each.__name__: each for each in (training_step, configure_optimizers)}
    return make(lightning, **{**hooks, **steps, **attributes})


def fit_both(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    schedule: str,
    loaders: Callable[[], list[Any]] = lambda: [data(14, 2), data(6, 2)],
    callbacks: Callable[[], list[Any]] = list,
    micro_batches: Any = "accumulate",
    accumulated: int | None = 4,
    reaches: float = 0.995,
    expected: int = 4,
    **options: Any,
) -> tuple[Fitted, Fitted]:
    """The same fit as windows and as one batch after the other, compared."""
    options = {"max_epochs": 2, **({} if accumulated is None else {"accumulate_grad_batches": accumulated}), **options}
    counts = [counting(lightning), counting(lightning)]
    alone = fit_alone(
        lightning, trainer, model(lightning), loaders(), callbacks=[*callbacks(), counts[0]], **options
    )  # fmt: skip
    made = strategy_of(lightning, schedule, micro_batches)
    split = fit_split(
        lightning,
        trainer,
        model(lightning),
        loaders(),
        made,
        reaches,
        expected,
        callbacks=[*callbacks(), counts[1]],
        **options,
    )
    assert made.plan.accumulated
    compare(split, alone)
    assert counts[1].rows == counts[0].rows
    assert counts[1].values == pytest.approx(counts[0].values, rel=1e-3, abs=1e-6)
    assert sorted(split.model.transferred) == sorted(alone.model.transferred)
    return split, alone


@in_turn(
    "options",
    {},
    {},
    {"limit_train_batches": 5, "gradient_clip_val": 0.1},
    {"val_check_interval": 2},
    {"max_steps": 3, "max_epochs": -1},
)
def test_windows_train_log_and_count_as_batches_one_after_the_other(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, options: dict[str, Any]
) -> None:
    fit_both(lightning, trainer, schedule, **options)


@by_schedule
def test_batches_of_one_sample_flow_as_windows_of_themselves(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    fit_both(
        lightning,
        trainer,
        schedule,
        lambda: [data(20, 1), data(6, 2)],
        micro_batches="accumulate",
        accumulated=16,
        expected=16,
        max_epochs=2,
    )


@by_schedule
def test_windows_grow_with_a_schedule_of_accumulation(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    growing = lightning.callbacks.GradientAccumulationScheduler
    fit_both(
        lightning,
        trainer,
        schedule,
        callbacks=lambda: [growing({0: 1, 1: 2, 2: 4})],
        accumulated=None,
        max_epochs=3,
    )


@in_turn("skipped", {1, 2}, {4, 7}, {4, 5, 6, 7})
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batches_without_a_loss_are_skipped_as_in_plain_lightning(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, skipped: set[int]
) -> None:
    class Noting(lightning.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.told: list[tuple[str, list[bool]]] = []

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            self.told.append(("backward", [parameter.grad is None for parameter in module.parameters()]))

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.told.append(("optimizer", [parameter.grad is None for parameter in module.parameters()]))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return None if batch_idx in skipped else loss

    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    loaders, notes = [data(22, 2), data(6, 2)], [Noting(), Noting()]
    split, plain = (make(lightning, training_step=training_step) for _ in range(2))
    alone = fit_alone(lightning, trainer, plain, loaders, callbacks=[notes[0]], **options)
    strategy = strategy_of(lightning, schedule, "accumulate")
    compare(fit_split(lightning, trainer, split, loaders, strategy, callbacks=[notes[1]], **options), alone)
    assert notes[1].told == notes[0].told


@by_schedule
def test_an_epoch_for_statistics_alone_takes_one_batch_after_the_other(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    def build(self: Any) -> nn.Sequential:
        norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        return nn.Sequential(norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(int(self.layers[0][1].num_batches_tracked))

    def averaged() -> dict[str, Any]:
        averaging = lightning.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)
        return {"accumulate_grad_batches": 4, "max_epochs": 3, "callbacks": [averaging]}

    attributes = {"build": build, "on_train_batch_start": on_train_batch_start}
    split, plain = (make(lightning, **attributes, seen=[]) for _ in range(2))
    loaders = [data(28, 4), data(6, 2)]
    alone = fit_alone(lightning, trainer, plain, loaders, **averaged())
    strategy = strategy_of(lightning, schedule, "accumulate")
    compare(fit(lightning, trainer, split, loaders, strategy=strategy, **averaged()), alone)
    assert strategy.plan.micro_batches == 4
    assert split.seen[-7:] == plain.seen[-7:] == list(range(7))


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from data(14).dataset


@by_schedule
def test_loaders_without_a_length(lightning: ModuleType, trainer: Callable[..., Any], schedule: str) -> None:
    def loaders() -> list[Any]:
        return [torch.utils.data.DataLoader(Stream(), batch_size=2), data(6, 2)]

    fit_both(lightning, trainer, schedule, loaders)


@in_turn("precision", "16-true", "bf16-true")
def test_half_precision(lightning: ModuleType, trainer: Callable[..., Any], schedule: str, precision: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2, "precision": precision}
    loaders = [data(14, 2), data(6, 2)]
    split = fit_split(
        lightning, trainer, model(lightning), loaders, strategy_of(lightning, schedule, "accumulate"), **options
    )
    alone = fit_split(
        lightning, trainer, model(lightning), loaders, strategy_of(lightning, "naive", 1), expected=1, **options
    )
    compare(split, alone, rtol=2e-2, atol=2e-2)
    assert sorted(split.model.transferred) == sorted(alone.model.transferred)


@in_turn("steps", 1, 2)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_run_goes_on_from_a_checkpoint_within_an_epoch(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, tmp_path: Any, steps: int
) -> None:
    def saving(name: str) -> list[Any]:
        return [lightning.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)]

    def strategy() -> Any:
        return strategy_of(lightning, schedule, "accumulate")

    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 4}
    loaders = [data(22, 2), data(6, 2)]
    kept: dict[str, Any] = {**options, "enable_checkpointing": True}
    alone = fit_alone(lightning, trainer, model(lightning), loaders, **kept, callbacks=saving("plain"))
    split = fit_split(
        lightning, trainer, model(lightning), loaders, strategy(), **kept, callbacks=saving("split")
    )  # fmt: skip
    compare(split, alone)
    (middle,) = [path.name for path in (tmp_path / "plain").glob(f"*step={steps}.ckpt")]
    expected = fit_alone(lightning, trainer, model(lightning), loaders, tmp_path / "plain" / middle, **options)
    plain_after = fit_alone(lightning, trainer, model(lightning), loaders, tmp_path / "split" / middle, **options)
    split_after = fit_split(
        lightning,
        trainer,
        model(lightning),
        loaders,
        strategy(),
        reaches=0,
        ckpt_path=tmp_path / "plain" / middle,
        **options,
    )
    compare(plain_after, expected)
    compare(split_after, expected)


@in_turn("in_step", False, True)
def test_a_fit_after_one_that_failed_in_a_window_trains_all_the_same(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, in_step: bool
) -> None:
    failing = [True]

    class Failing(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if failing[0] and not in_step and batch_idx == 1:
                raise RuntimeError("stop here")

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if failing[0] and in_step and batch_idx == 2:
            raise RuntimeError("stop here")
        return loss

    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 4}
    loaders = [data(14, 2), data(6, 2)]
    strategy = strategy_of(lightning, schedule, "accumulate")
    made = trainer(strategy=strategy, callbacks=[Failing()], **options)
    split = make(lightning, training_step=training_step)
    with no_thread_left(), pytest.raises(RuntimeError, match="stop here"):
        made.fit(split, *loaders)
    failing[0] = False
    plain = make(lightning, training_step=training_step)
    alone = fit_alone(lightning, trainer, plain, loaders, **options)
    made.fit(split, *loaders)
    assert made.strategy.plan.micro_batches == 4
    assert made.global_step == alone.trainer.global_step == 2
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)


def test_hooks_on_parameters_let_batches_come_one_after_the_other(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    split = make(lightning)
    split.layers[1][0].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    made = trainer(strategy=strategy_of(lightning, "1f1b", "accumulate"), accumulate_grad_batches=4)
    made.fit(split, data(14, 2), data(6, 2))
    assert made.strategy.plan.micro_batches == 1
    assert sum("`layers.1.0.weight` has a gradient hook" in said for said in messages) == 1
