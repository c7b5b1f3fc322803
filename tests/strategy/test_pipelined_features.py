"""What Lightning offers works in micro-batches as it does for whole batches in plain Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from autobalance.strategy.parts.pipelined import PartlySkippedError
from autobalance.strategy.registration import strategy_class
from tests.strategy.split_runs import (
    CLASSES,
    WIDTH,
    Fitted,
    by_schedule,
    compare,
    data,
    fit_alone,
    fit_split,
    in_turn,
    make,
    strategy_of,
)

pytestmark = pytest.mark.usefixtures("simulated")


PLANS: dict[str, Any] = {}


def known_plan(lightning: ModuleType, trainer: Callable[..., Any], schedule: str) -> Any:
    """The plan under a schedule of the model and its batches as they are, made once."""
    if schedule not in PLANS:
        strategy = strategy_of(lightning, schedule)
        few: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 1}  # of one epoch, less is logged at once
        trainer(strategy=strategy, **few).fit(make(lightning), data(), data())
        PLANS[schedule] = strategy.plan
    return PLANS[schedule]


def fit_both(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    schedule: str,
    model: Callable[[], Any] | None = None,
    loaders: Callable[[], list[Any]] = lambda: [data(), data()],
    callbacks: Callable[[], list[Any]] = list,
    strategy: dict[str, Any] | None = None,
    reaches: float = 0.995,
    beside: int = 0,
    is_planned: bool = False,
    **options: Any,
) -> tuple[Fitted, Fitted]:
    """The same fit in micro-batches and alone, compared.

    Args:
        is_planned: whether the plan is made already, as that of the model and its batches as they are.
    """
    model = model or (lambda: make(lightning))
    options = {"max_epochs": 2, **options}
    alone = fit_alone(lightning, trainer, model(), loaders(), callbacks=callbacks(), **options)
    asked = {"plan": known_plan(lightning, trainer, schedule)} if is_planned else {}
    made = strategy_of(lightning, schedule, **asked, **(strategy or {}))
    split = fit_split(
        lightning, trainer, model(), loaders(), made, reaches, beside=beside, callbacks=callbacks(), **options
    )
    compare(split, alone)
    return split, alone


@in_turn(
    "options",
    {"accumulate_grad_batches": 3, "limit_train_batches": 5},
    {"accumulate_grad_batches": 3, "limit_train_batches": 5},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"max_steps": 8, "max_epochs": -1},
)
def test_training_options(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, options: dict[str, Any]
) -> None:
    fit_both(lightning, trainer, schedule, loaders=lambda: [data(40), data()], **options)


def gradients(module: Any) -> dict[str, Tensor]:
    return {name: p.grad.detach().cpu().clone() for name, p in module.named_parameters() if p.grad is not None}


def watching(base: Any) -> type:
    """A class that keeps the gradients that each hook sees, and has its own way to zero, step and go backward."""

    class Watching(base):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, dict[str, Tensor]]] = []

        def see(self, name: str) -> None:
            self.seen.append((name, gradients(self)))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.see("on_before_zero_grad")

        def on_before_backward(self, loss: Tensor) -> None:
            self.see("on_before_backward")

        def on_after_backward(self) -> None:
            self.see("on_after_backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.see("on_before_optimizer_step")

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.see("optimizer_zero_grad")
            optimizer.zero_grad(set_to_none=False)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.see("optimizer_step")

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 2).backward()

    return Watching


@in_turn("accumulated", 3, 1)
def test_hooks_see_the_gradients_of_whole_batches(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, accumulated: int
) -> None:
    def watched() -> Any:
        return watching(type(make(lightning)))()

    split, alone = fit_both(
        lightning, trainer, schedule, watched, lambda: [data(40), data()], accumulate_grad_batches=accumulated
    )
    assert [name for name, _ in split.model.seen] == [name for name, _ in alone.model.seen]
    for (name, found), (_, expected) in zip(split.model.seen, alone.model.seen, strict=True):
        assert set(found) == set(expected), name
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_parameters_in_no_optimizer_add_up_their_gradients(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def some(self: Any) -> Any:
        return torch.optim.SGD(self.layers[1:].parameters(), lr=0.1)

    split, alone = fit_both(lightning, trainer, "1f1b", lambda: make(lightning, configure_optimizers=some))
    found, expected = gradients(split.model), gradients(alone.model)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@in_turn("accumulated", 1, 3)
def test_hooks_on_parameters_see_the_gradient_of_a_whole_batch(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, accumulated: int
) -> None:
    def hooked() -> Any:
        model = make(lightning)
        for parameter in model.layers[1].parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return model

    fit_both(lightning, trainer, schedule, hooked, accumulate_grad_batches=accumulated)


@by_schedule
def test_a_loss_that_is_a_sum(lightning: ModuleType, trainer: Callable[..., Any], schedule: str) -> None:
    def loss(self: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 8

    fit_both(lightning, trainer, schedule, lambda: make(lightning, loss=loss))


@by_schedule
def test_a_loss_that_ignores_targets_is_weighted_by_what_it_counts(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    def loss_weight(self: Any, batch: Any) -> Tensor:
        return (batch["y"] != -100).sum()

    def loss(self: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], ignore_index=-100)

    def loaders() -> list[Any]:
        generator = torch.Generator().manual_seed(4)
        rows: Any = [
            {"x": torch.randn(WIDTH, generator=generator), "y": -100 if index % 4 < 2 else index % CLASSES}
            for index in range(22)
        ]
        return [DataLoader(rows, batch_size=8)] * 2

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    attributes = {"loss": loss, "loss_weight": loss_weight, "training_step": training_step}
    fit_both(lightning, trainer, schedule, lambda: make(lightning, **attributes), loaders)


@in_turn("samples", 17, 27)  # a last batch of one, or of three
def test_batches_that_do_not_divide(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, samples: int
) -> None:
    fit_both(lightning, trainer, schedule, loaders=lambda: [data(samples), data(samples, 5)], is_planned=True)


@in_turn(("reentrant", "blocks"), (False, 1), (False, 2), (True, 2), (True, 1))
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in validation
def test_checkpointing_by_the_user(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, reentrant: bool, blocks: int
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1 : 1 + blocks], x, use_reentrant=reentrant)
        made: Tensor = self.layers[1 + blocks :](x)
        return made

    fit_both(lightning, trainer, schedule, lambda: make(lightning, forward=forward))


@by_schedule
def test_every_epoch_has_its_batches_in_the_order_of_plain_lightning(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    loader = data()
    shuffled = partial(DataLoader, loader.dataset, batch_size=8, shuffle=True)
    fit_both(lightning, trainer, schedule, loaders=lambda: [shuffled(), data()], max_epochs=3)


def pairs(*sizes: tuple[int, int]) -> DataLoader[Any]:
    """Batches of labelled samples and of others, with as many of each as `sizes` says."""
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(few, WIDTH, generator=generator), torch.arange(few) % CLASSES, torch.randn(more, WIDTH))
        for few, more in sizes
    ]
    return DataLoader(batches, batch_size=None)


@by_schedule
def test_batches_that_cannot_be_split_run_whole_among_those_that_can(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    def loss(self: Any, batch: Any) -> Tensor:
        inputs, labels, others = batch
        return functional.cross_entropy(self(inputs), labels) + self(others).square().mean()

    def loaders() -> list[Any]:
        torch.manual_seed(5)
        return [pairs((8, 8), (8, 5), (8, 8), (8, 3)), pairs((8, 8), (4, 7))]

    with pytest.warns(
        UserWarning, match=r"This batch runs whole(.|\n)*batch\[2\] is \(7, 8\)(.|\n)*split_batch"
    ) as said:
        split, _ = fit_both(lightning, trainer, schedule, lambda: make(lightning, loss=loss), loaders)
    assert sum("runs whole" in str(warning.message) for warning in said) == 1
    batch = next(iter(pairs((4, 7))))
    with pytest.warns(UserWarning, match="This batch runs whole"):
        (predicted,) = split.trainer.predict(split.model, pairs((4, 7)))
    torch.testing.assert_close(predicted.cpu(), split.model.cpu()(batch[0]))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # Lightning's own
@by_schedule
def test_a_batch_of_which_a_part_has_no_loss_is_skipped_as_in_plain_lightning(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    def skipping() -> Any:
        class Skipping(type(make(lightning))):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step(batch, batch_idx) if batch[0].isfinite().all() else None

        return Skipping()

    def loaders() -> list[Any]:
        batches = list(data(40))
        batches[2][0][5] = torch.nan
        batches[3][0].fill_(torch.nan)  # no part has a loss
        batches[4] = [each[:1] for each in batches[4]]  # and the next batch cannot be split
        return [DataLoader(batches, batch_size=None), data()]

    with pytest.warns(UserWarning, match=r"This batch runs whole(.|\n)*returned no loss for micro-batch"):
        fit_both(lightning, trainer, schedule, skipping, loaders)


def test_a_part_without_a_loss_is_an_error_where_gradients_of_earlier_batches_would_be_lost(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    class Skipping(type(make(lightning))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch[0].isfinite().all() else None

    batches = list(data())
    batches[1][0][5] = torch.nan
    made = trainer(strategy=strategy_of(lightning, "1f1b"), accumulate_grad_batches=3)
    with pytest.raises(PartlySkippedError, match=r"no loss for micro-batch 3 of 4.*Skip it in the loader, or set"):
        made.fit(Skipping(), DataLoader(batches, batch_size=None), data())


def normalised(self: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, CLASSES),
    )


@by_schedule
def test_deferred_batch_norm_keeps_statistics_of_the_full_batch(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    def frozen(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def model() -> Any:
        return make(lightning, build=normalised, configure_optimizers=frozen)

    loaders = [data(20), data(20)]
    alone = fit_alone(lightning, trainer, model(), loaders, max_epochs=2)
    strategy = strategy_of(lightning, schedule, batch_norm="deferred")
    split = fit_split(lightning, trainer, model(), loaders, strategy, max_epochs=2)
    for name, value in alone.model.layers[1].state_dict().items():
        torch.testing.assert_close(
            split.model.layers[1].state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-6, msg=name
        )
    found, expected = (float(each.trainer.callback_metrics["val"]) for each in (split, alone))
    assert found == pytest.approx(expected, rel=1e-4)


@in_turn("kind", "moving", "stochastic")
def test_averages_of_weights(lightning: ModuleType, trainer: Callable[..., Any], schedule: str, kind: str) -> None:
    def averaging() -> list[Any]:
        if kind == "moving":
            return [lightning.callbacks.WeightAveraging(device="cpu", avg_fn=get_ema_avg_fn(0.9))]
        return [lightning.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]

    options: dict[str, Any] = {"reaches": 0, "beside": 512, "max_epochs": 4, "is_planned": True}
    fit_both(lightning, trainer, schedule, callbacks=averaging, **options)  # beside it is the number of averages


@by_schedule
def test_runs_that_stop_early(lightning: ModuleType, trainer: Callable[..., Any], schedule: str) -> None:
    class Stop(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 1

    split, _ = fit_both(lightning, trainer, schedule, callbacks=lambda: [Stop()], max_epochs=4, is_planned=True)
    assert split.trainer.global_step == 5
    patient = lightning.callbacks.EarlyStopping
    stopping: Callable[[], list[Any]] = lambda: [patient("val", patience=1, min_delta=9.0)]
    split, _ = fit_both(lightning, trainer, schedule, callbacks=stopping, max_epochs=9, is_planned=True)
    assert split.trainer.current_epoch == 2


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_checkpoints_go_from_split_to_plain_and_back(
    lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Any
) -> None:
    def saving(name: str) -> list[Any]:
        return [lightning.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1)]

    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    loaders = [data(40), data()]
    alone = fit_alone(lightning, trainer, make(lightning), loaders, **options, callbacks=saving("plain"))
    strategy = strategy_of(lightning, "1f1b")
    split = fit_split(lightning, trainer, make(lightning), loaders, strategy, **options, callbacks=saving("split"))
    compare(split, alone)
    (middle,) = [path.name for path in (tmp_path / "plain").glob("*step=3.ckpt")]
    resumed = {
        name: fit_alone(lightning, trainer, make(lightning), loaders, tmp_path / name / middle, max_epochs=2)
        for name in ("plain", "split")
    }
    strategy, path = strategy_of(lightning, "1f1b", plan=strategy.plan), tmp_path / "plain" / middle
    goes_on = fit_split(
        lightning, trainer, make(lightning), loaders, strategy, reaches=0, ckpt_path=path, max_epochs=2
    )  # fmt: skip
    compare(resumed["split"], resumed["plain"])
    compare(goes_on, resumed["plain"])


def test_the_batch_size_finder_plans_micro_batches_of_each_size(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    def sized() -> Any:
        loading = {name: lambda self: data(48, self.batch_size) for name in ("train_dataloader", "val_dataloader")}
        return make(lightning, batch_size=4, **loading)

    def tuned(**options: Any) -> Fitted:
        model, made = sized(), trainer(**options)
        tuner = importlib.import_module(f"{lightning.__name__}.tuner").Tuner(made)
        assert tuner.scale_batch_size(model, init_val=4, steps_per_trial=1, max_trials=2) == 8
        made.fit(model)
        return Fitted(made, model, [])

    strategy = strategy_of(lightning, "1f1b")
    split = tuned(strategy=strategy)
    compare(split, tuned(accelerator="cpu", devices=1, strategy="auto"))
    assert strategy.plan.micro_batches == 4
    assert "8x8" in strategy.plan.batch
    assert split.trainer.global_step == 6


def test_validate_test_and_predict_split_batches(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    split, plain = make(lightning), make(lightning)
    made, one = (
        trainer(strategy=strategy_of(lightning, "1f1b")),
        trainer(accelerator="cpu", devices=1, strategy="auto"),
    )
    for run in ("validate", "test"):
        (found,) = getattr(made, run)(split, data(27), verbose=False)
        (expected,) = getattr(one, run)(plain, data(27), verbose=False)
        assert made.strategy.plan.micro_batches == 4
        assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(
        [each.cpu() for each in made.predict(split, data(27))], one.predict(plain, data(27)), rtol=1e-4, atol=1e-5
    )


@by_schedule
def test_steps_without_gradients_may_ask_for_some(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str
) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            (forces,) = torch.autograd.grad(self(inputs).sum(), inputs)
        self.log("forces", forces.square().sum(1).mean())

    attributes = {"validation_step": validation_step, "test_step": validation_step}
    split, alone = fit_both(
        lightning, trainer, schedule, lambda: make(lightning, **attributes), inference_mode=False, max_epochs=1
    )
    (expected,) = alone.trainer.test(alone.model, data(), verbose=False)
    (found,) = split.trainer.test(split.model, data(), verbose=False)
    assert found == pytest.approx(expected, rel=1e-5)


def test_steps_inside_the_backward_keep_batches_whole(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    def stepping(self: Any) -> Any:
        own = {each: torch.optim.SGD([each], lr=0.1) for each in self.layers[0].parameters()}

        def step(parameter: nn.Parameter) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for each in own:
            each.register_post_accumulate_grad_hook(step)
        return torch.optim.SGD(self.layers[1:].parameters(), lr=0.1)

    split, plain = (make(lightning, configure_optimizers=stepping) for _ in range(2))
    made = trainer(strategy=strategy_of(lightning, "1f1b"))
    made.fit(split, data(), data())
    fit_alone(lightning, trainer, plain, [data(), data()])
    assert made.strategy.plan.micro_batches == 1
    assert sum("`layers.0.0.weight`, `layers.0.0.bias` have hooks after" in said for said in messages) == 1
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("schedule", "devices"), [("looped", (0, 1, 0, 1)), ("gpipe", (0, 1, 1, 0))], ids=["looped", "V"]
)
def test_plans_whose_stages_come_back_to_a_device(
    lightning: ModuleType, trainer: Callable[..., Any], schedule: str, devices: tuple[int, ...]
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        made: Tensor = self.layers[3](self.layers[2](self.layers[1](first)) + first)
        return made

    pins = {f"layers.{index}": device for index, device in enumerate(devices)}
    options: dict[str, Any] = {"devices": 2, "max_epochs": 2}
    alone = fit_alone(lightning, trainer, make(lightning, forward=forward), [data(), data()], max_epochs=2)
    strategy = strategy_of(lightning, schedule, pin=pins)
    for _ in range(2):
        split = fit_split(lightning, trainer, make(lightning, forward=forward), [data(), data()], strategy, **options)
        assert (strategy.plan.assignment, strategy.plan.schedule) == (devices, schedule)
        assert len(strategy.plan.stages) == 4 - (schedule == "gpipe")
        compare(split, alone)
        strategy = strategy_class((lightning.__name__,))(plan=strategy.plan)
