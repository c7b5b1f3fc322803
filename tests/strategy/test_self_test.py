"""The test before the first batch is split, in the user's own step: right verdicts, and no trace of it in the run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from autobalance.execution.batches.merging import Rule
from autobalance.strategy.parts.self_test import log_rules, verdict_on
from autobalance.strategy.registration import strategy_class
from autobalance.strategy.scheduled_steps import ScheduledSteps

Step = Callable[[Any, Tensor, Tensor], Any]


def make(lightning: ModuleType, step: Step, tests: bool = True) -> Any:
    """A module with a step of its own, which is tested before its first batch if `tests`."""

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
            self.accuracies = nn.ModuleList(MulticlassAccuracy(3, average="micro") for _ in range(2))
            self.verdicts: dict[str, Any] = {}
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, *batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, *batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.test("train", self.trainer.strategy.training_step, batch, batch_idx)

        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.test("validate", self.trainer.strategy.validation_step, batch, batch_idx)

        def test(self, kind: str, step: Any, batch: Any, batch_idx: int) -> None:
            if tests and kind not in self.verdicts:
                self.verdicts[kind] = verdict_on(self.trainer, step, batch, (batch_idx,), nullcontext)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Net()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 3), batch_size=8)


def fit(trainer: Callable[..., Any], module: Any, **options: Any) -> Any:
    made = trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2, num_sanity_val_steps=0, **options)
    torch.manual_seed(2)
    made.fit(module, loader(), loader())
    return made


def classifies(module: Any, x: Tensor, y: Tensor) -> Any:
    logits = module.net(x)
    loss = functional.cross_entropy(logits, y)
    accuracy = module.accuracies[int(module.training)]
    accuracy(logits, y)
    module.log("loss", loss)
    module.log("accuracy", accuracy, on_epoch=True)
    module.log("largest", logits.detach().abs().max(), reduce_fx="max")
    return {"loss": loss, "logits": logits.detach()}


def test_a_step_that_may_be_split_is_accepted_and_the_run_is_as_without_the_test(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    with_test, without = make(lightning, classifies), make(lightning, classifies, tests=False)
    run, plain = fit(trainer, with_test), fit(trainer, without)
    assert all(verdict.ok for verdict in with_test.verdicts.values()), with_test.verdicts
    assert with_test.verdicts["train"].output_rules == {"['logits']": Rule("cat", 0)}
    assert log_rules(with_test.verdicts["train"])["largest"] == Rule("max")
    assert "loss" in log_rules(with_test.verdicts["validate"])
    for one, other in zip(with_test.state_dict().values(), without.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert {name: value.item() for name, value in run.callback_metrics.items()} == {
        name: value.item() for name, value in plain.callback_metrics.items()
    }


def test_validation_steps_that_collect_are_refused_by_name(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def collects(module: Any, x: Tensor, y: Tensor) -> Any:
        loss = functional.cross_entropy(module.net(x), y)
        if not module.training:
            module.seen.append(loss.item())
        return loss

    module = make(lightning, collects)
    fit(trainer, module)
    assert module.verdicts["train"].ok
    assert "the step changes `seen` of the module" in module.verdicts["validate"].reason
    assert len(module.seen) == 4


@pytest.mark.both_packages
def test_nothing_reaches_loggers_or_the_terminal(
    lightning: ModuleType, trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def talks(module: Any, x: Tensor, y: Tensor) -> Any:
        module.print("step")
        module.logger.log_metrics({"own": 1.0})
        return functional.cross_entropy(module.net(x), y)

    logger = importlib.import_module(f"{lightning.__name__}.loggers").CSVLogger(tmp_path)
    module = make(lightning, talks)
    made = fit(trainer, module, logger=logger, log_every_n_steps=1)
    assert module.verdicts["train"].ok
    assert capsys.readouterr().out.count("step") == 8  # 2 epochs of 2 + 2 batches
    assert (
        sum("own" in metrics for metrics in logger.experiment.metrics)
        + len((tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[1:])
        == 8
    )
    assert made.loggers == [logger]


def test_a_batch_of_one_sample_has_nothing_to_compare(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    module = make(lightning, lambda module, x, y: functional.cross_entropy(module.net(x), y))
    made = trainer(accelerator="cpu", devices=1, strategy="auto", limit_train_batches=1)
    single = DataLoader(TensorDataset(torch.randn(1, 4), torch.zeros(1, dtype=torch.int64)))
    made.fit(module, single, single)
    assert module.verdicts["train"].ok


def test_gradients_of_half_precision_are_close_enough(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def contrasts(module: Any, x: Tensor, y: Tensor) -> Any:
        code = functional.normalize(module.net(x).float(), dim=1)
        return functional.cross_entropy(code @ code.T * 5, torch.arange(len(code)))

    for step, ok in ((classifies, True), (contrasts, False)):
        module = make(lightning, step)
        fit(trainer, module, precision="bf16-mixed")
        assert module.verdicts["train"].ok is ok, module.verdicts["train"]


@pytest.mark.usefixtures("simulated")
def test_a_model_that_is_placed_is_tested_where_it_is(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def neighbours(module: Any, x: Tensor, y: Tensor) -> Any:
        code = module.net(x)
        return (code * code.roll(1, 0)).sum(1).mean()

    class Net(type(make(lightning, classifies))):  # type: ignore[misc]
        step = staticmethod(classifies)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(self, *batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            strategy = self.trainer.strategy
            plain = super(ScheduledSteps, strategy).training_step
            for self.step in (neighbours, classifies):
                verdict = verdict_on(self.trainer, plain, batch, (batch_idx,), strategy.glue)
                self.verdicts[self.step.__name__] = verdict

    module = Net()
    strategy = strategy_class((lightning.__name__,))(micro_batches=2, schedule="1f1b")
    made = trainer(strategy=strategy, num_sanity_val_steps=0, limit_train_batches=1)
    made.fit(module, loader(), loader())
    assert strategy.plan.micro_batches == 2
    accepted = {name: verdict.ok for name, verdict in module.verdicts.items()}
    assert accepted == {"classifies": True, "neighbours": False, "validate": True}
    assert "the loss couples the samples of a batch" in module.verdicts["neighbours"].reason


def doubled_gradient(loss: Tensor, samples: int) -> Tensor:
    """The loss, with gradients that grow with the number of samples, as no mean over samples has them."""
    return loss + (loss - loss.detach()) * samples


def only_at(first: Tensor) -> Step:
    """A step whose gradients tell how many samples there are where the sample `first` is among them."""

    def step(module: Any, x: Tensor, y: Tensor) -> Any:
        loss = functional.cross_entropy(module.net(x), y)
        return doubled_gradient(loss, len(x)) if (x == first).all(1).any() else loss

    return step


def test_samples_of_which_one_sits_on_a_kink_are_no_reason_where_others_agree(
    lightning: ModuleType, trainer: Callable[..., Any]
) -> None:
    module = make(lightning, only_at(next(iter(loader()))[0][0]))
    fit(trainer, module)
    assert module.verdicts["train"].ok


def test_gradients_that_couple_all_samples_are_refused(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def step(module: Any, x: Tensor, y: Tensor) -> Any:
        return doubled_gradient(functional.cross_entropy(module.net(x), y), len(x))

    module = make(lightning, step)
    fit(trainer, module)
    assert "the gradients couple the samples of a batch" in module.verdicts["train"].reason
