"""What Lightning offers works on four simulated devices as on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, ConvNet, loader
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from tests.strategy import split_runs
from tests.strategy.split_runs import CLASSES, WIDTH, compare, data, fit, fit_alone

pytestmark = pytest.mark.usefixtures("simulated")


def normalised(self: Any) -> nn.Sequential:
    """Six blocks, batch norms among them, for which batches stay whole."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, CLASSES),
    )


make = partial(split_runs.make, build=normalised)


def tuner_of(lightning: ModuleType) -> Any:
    return importlib.import_module(f"{lightning.__name__}.tuner").Tuner


def fit_on_both(
    lightning: ModuleType,
    trainer: Callable[..., Any],
    model: Callable[[], Any] | None = None,
    callbacks: Callable[[], list[Any]] = list,
    **options: Any,
) -> tuple[Any, Any]:
    """Trainers after the same fit on four simulated devices and on the CPU, weights compared."""
    model = model or (lambda: make(lightning))
    options, loaders = {"max_epochs": 2, **options}, [data(32), data(32)]
    split = fit(lightning, trainer, model(), loaders, callbacks=callbacks(), **options)
    alone = fit_alone(lightning, trainer, model(), loaders, callbacks=callbacks(), **options)
    assert set(split.trainer.strategy.plan.assignment) == {0, 1, 2, 3}
    compare(split, alone)
    return split.trainer, alone.trainer


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 4},
        {"accumulate_grad_batches": 3},
        {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2},
        {"overfit_batches": 2},
        {"fast_dev_run": 2},
    ],
    ids=str,
)
def test_training_options(lightning: ModuleType, trainer: Callable[..., Any], options: dict[str, Any]) -> None:
    fit_on_both(lightning, trainer, **options)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),  # has state from the start
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    ],
    ids=["Adagrad", "AdamW foreach", "AdamW"],
)
def test_optimizers(lightning: ModuleType, trainer: Callable[..., Any], optimizer: Callable[[Any], Any]) -> None:
    fit_on_both(
        lightning, trainer, lambda: make(lightning, configure_optimizers=lambda self: optimizer(self.parameters()))
    )


def test_an_optimizer_that_gathers_all_parameters_is_refused(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    model = make(lightning, configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))
    with pytest.raises(ValueError, match="LBFGS gathers the gradients of all parameters in one tensor"):
        trainer().fit(model, data(32), data(32))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    trainer(devices=1).fit(model, data(32), data(32))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
@pytest.mark.parametrize("devices", [1, 4])
def test_mixed_precision_reaches_the_inside_of_blocks(
    lightning: ModuleType, trainer: Callable[..., Any], precision: str, dtype: torch.dtype, devices: int
) -> None:
    model = make(lightning)
    seen: list[torch.dtype] = []
    model.layers[3].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    made = trainer(precision=precision, devices=devices, strategy="self_balance" if devices > 1 else "auto")
    made.fit(model, data(32), data(32))
    assert set(seen) == {dtype}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    scaler = getattr(made.precision_plugin, "scaler", None)
    assert (scaler is not None and scaler.is_enabled()) == (precision == "16-mixed")


def test_bf16_true(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = make(lightning)
    made = trainer(precision="bf16-true")
    made.fit(model, data(32), data(32))
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert torch.isfinite(made.callback_metrics["train"])


def test_manual_optimization_of_two_networks(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
            self.critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

        def self_balance(self) -> list[Any]:
            return [*self.generator, *self.critic]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = batch[0]
            for_generator, for_critic = self.optimizers()
            self.toggle_optimizer(for_generator)
            loss = F.softplus(-self.critic(self.generator(real.flip(0)))).mean()
            for_generator.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(for_generator, 0.5, "norm")
            for_generator.step()
            self.untoggle_optimizer(for_generator)
            fake = self.generator(real.flip(0)).detach()
            with for_critic.toggle_model():
                loss = F.softplus(self.critic(fake)).mean() + F.softplus(-self.critic(real)).mean()
                for_critic.zero_grad()
                self.manual_backward(loss)
                for_critic.step()
            self.lr_schedulers().step()
            self.log("critic", loss)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.critic(batch[0]).mean())

        def configure_optimizers(self) -> Any:
            first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
            second = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]

    fit_on_both(lightning, trainer, Gan)


def test_exponential_moving_average(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    fit_on_both(lightning, trainer, callbacks=lambda: [lightning.callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9))])


def test_stochastic_weight_averaging_with_batch_norm(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    averaging = lightning.callbacks.StochasticWeightAveraging
    fit_on_both(lightning, trainer, callbacks=lambda: [averaging(0.05, swa_epoch_start=1)], max_epochs=4)


@pytest.mark.both_packages
@pytest.mark.filterwarnings("ignore:.*`lr_scheduler.step.*:UserWarning")
def test_callbacks_that_watch(lightning: ModuleType, trainer: Callable[..., Any], tmp_path: Any) -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    callbacks = lightning.callbacks
    four, one = fit_on_both(
        lightning,
        trainer,
        lambda: make(lightning, configure_optimizers=configure_optimizers),
        lambda: [
            callbacks.EarlyStopping("val", patience=1, min_delta=10.0),
            callbacks.ModelCheckpoint(tmp_path, monitor="val", save_last=True),
            callbacks.LearningRateMonitor("epoch"),
        ],
        max_epochs=6,
        enable_checkpointing=True,
        logger=lightning.loggers.CSVLogger(tmp_path),
    )
    assert four.current_epoch == one.current_epoch == 2


def test_learning_rate_finder(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = make(lightning, lr=0.1)
    type(model).configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=self.lr)
    made = trainer()
    found = tuner_of(lightning)(made).lr_find(model, data(32), data(32), num_training=12, early_stop_threshold=None)
    assert len(found.results["loss"]) > 1
    made.fit(model, data(32), data(32))


@pytest.mark.both_packages
def test_batch_size_finder_plans_again_for_the_larger_batch(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model = make(lightning, batch_size=2)
    type(model).train_dataloader = type(model).val_dataloader = lambda self: data(64, self.batch_size)
    made = trainer()
    tuner_of(lightning)(made).scale_batch_size(model, max_trials=3)
    assert model.batch_size == 8
    made.fit(model)
    assert "8x8" in made.strategy.plan.batch


def test_one_plan_serves_fit_validate_test_and_predict(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model, plain = make(lightning), make(lightning)
    made, one = trainer(), trainer(accelerator="cpu", devices=1, strategy="auto")
    made.fit(model, data(32), data(32))
    one.fit(plain, data(32), data(32))
    plan = made.strategy.plan
    for run in ("validate", "test"):
        (found,) = getattr(made, run)(model, data(32), verbose=False)
        (expected,) = getattr(one, run)(plain, data(32), verbose=False)
        assert found == pytest.approx(expected, rel=1e-5)
        assert made.strategy.plan is plan
    predictions = made.predict(model, data(32))
    torch.testing.assert_close(torch.cat(predictions), torch.cat(one.predict(plain, data(32))), rtol=1e-4, atol=1e-5)
    assert made.strategy.plan is plan
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_run_without_training_is_planned_for_inference(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    model, made = make(lightning), trainer()
    made.predict(model, data(32))
    inference = made.strategy.plan
    made.fit(model, data(32), data(32))
    assert made.strategy.plan is not inference
    assert sum(made.strategy.plan.peaks) > sum(inference.peaks)


@pytest.mark.parametrize("case", ["skip in glue", "gpt"])
def test_the_model_can_be_called_outside_of_steps(
    lightning: ModuleType, trainer: Callable[..., Any], case: str
) -> None:
    model = CASES[case].make(lightning.LightningModule)
    ((inputs, _),) = CASES[case].batches(1)
    model.example_input_array = inputs
    called: list[Tensor] = []

    class Sample(lightning.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            with torch.no_grad():
                called.append(module(inputs.to(module.device)).cpu())

    summary = lightning.callbacks.ModelSummary(max_depth=1)
    trainer(enable_model_summary=True, callbacks=[Sample(), summary]).fit(model, loader(CASES[case].batches(2)))
    torch.testing.assert_close(called[0], model(inputs), rtol=1e-5, atol=1e-6)
    assert "forward" not in vars(model)


def test_images_through_a_batch_norm_convnet(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    assert CASES["batch norm convnet"].body is ConvNet
    model = CASES["batch norm convnet"].make(lightning.LightningModule)
    made = trainer(max_epochs=2)
    made.fit(model, loader(CASES["batch norm convnet"].batches(2)))
    assert torch.isfinite(model.last_loss)
