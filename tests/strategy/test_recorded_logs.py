"""What micro-batches log reaches callbacks, progress bar and logger as what the whole batch logs in plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryPrecision,
    BinaryRecall,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
)

from autobalance.execution.batches.merging import Rule
from autobalance.execution.batches.splitting import parts_of
from autobalance.execution.micro_batch import MicroBatch, working_on
from autobalance.strategy.parts.recorded_logs import RecordedLogs

Step = Callable[[Any, Tensor, Tensor, Tensor], None]
"""What a module logs, given itself, predictions, targets and losses of samples."""


class Scores(torchmetrics.Metric):
    """Says nothing about how its states are merged, as most metrics of users."""

    scores: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("batches", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, losses: Tensor) -> None:
        self.scores = self.scores + losses.max()  # not a sum over samples: parts give something else
        self.batches = self.batches + 1

    def compute(self) -> Tensor:
        return self.scores / self.batches


def make_module(lightning: ModuleType, step: Step, metrics: Callable[[], Any], micro_batches: int) -> Any:
    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Linear(4, 3)
            self.train_metric, self.val_metric = metrics(), metrics()
            self.logs = RecordedLogs(self)
            self.bars: list[dict[str, float]] = []
            self.seen: list[dict[str, float]] = []

        @property
        def metric(self) -> Any:
            return self.train_metric if self.trainer.training else self.val_metric

        def user_step(self, batch: Any) -> Tensor:
            x, y = batch
            losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
            step(self, self.net(x).softmax(1).detach(), y, losses)
            return losses.mean()

        def whole_step(self, batch: Any) -> Tensor:
            if micro_batches == 1:
                return self.user_step(batch)
            parts = parts_of(self, batch, micro_batches)
            losses = []
            with self.logs.recording():
                for number, part in enumerate(parts.batches):
                    with working_on(MicroBatch(number, len(parts.batches))):
                        losses.append(self.user_step(part))
            self.logs.replay(parts.sizes, parts.weights)
            return torch.stack([loss * weight for loss, weight in zip(losses, parts.weights, strict=True)]).sum()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.whole_step(batch)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.whole_step(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            self.bars.append(dict(self.trainer.progress_bar_metrics))
            self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


def fit(lightning: ModuleType, net: Any) -> dict[str, list[dict[str, float]]]:
    """Train for two epochs of batches of 7 and 5 samples, and give all that was logged."""
    logged: list[dict[str, float]] = []

    class Keep(lightning.pytorch.loggers.Logger if hasattr(lightning, "pytorch") else lightning.loggers.Logger):  # type: ignore[misc]
        name, version = "keep", "0"

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append({**metrics, "step": step or 0})

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 3), batch_size=7)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=Keep(),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(net, data, data)
    final = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"logger": logged, "bar": net.bars, "step by step": net.seen, "in the end": [final]}


def logs_value(**options: Any) -> Step:
    return lambda self, p, y, losses: self.log("loss", losses.mean(), **options)


def log_collection(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.log_dict(self.metric(p, y), on_step=True, on_epoch=False)


def update_collection(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.metric.update(p, y)
    self.log_dict(self.metric, on_step=False, on_epoch=True)


def call_metric(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.metric(p, y)
    self.log("metric", self.metric, on_step=True, on_epoch=True, prog_bar=True)


def log_answer(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.log("answer", self.metric(p, y), on_step=True, on_epoch=True)


def update_compute_reset(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.metric.update(p, y)
    self.log("computed", self.metric.compute(), on_step=True, on_epoch=True)
    self.metric.reset()


def mean_of_means(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.metric(losses.mean())
    self.log("metric", self.metric, on_step=True, on_epoch=True)


def many(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.log_dict({"loss": losses.mean(), "hits": (p.argmax(1) == y).float().mean()}, prog_bar=True, on_epoch=True)
    self.log("number", 3.0)
    self.log("positional", losses.mean(), True, False, True, True, "mean")


def twice(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.log("loss", losses.mean(), on_step=True, on_epoch=True)
    self.log("loss", 2 * losses.mean(), on_step=True, on_epoch=True)


def log_extremes(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.log_dict(self.metric(p, y), on_step=True, on_epoch=False)


def nothing() -> Any:
    return None


def f1() -> Any:
    return MulticlassF1Score(3, average="macro")


def collection() -> Any:
    return torchmetrics.MetricCollection(
        {"accuracy": MulticlassAccuracy(3, average="micro"), "f1": f1(), "recall": MulticlassAccuracy(3)}, prefix="m/"
    )


def of_two_classes(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of which some parts have only such as could be probabilities, and labels."""
    return scores[:, 0] + 0.5, (y > 0).long()


def call_binary(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.log_dict(self.metric(*of_two_classes(p, y)), on_step=True, on_epoch=True)


def update_binary(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    self.metric.update(*of_two_classes(p, y))
    self.log_dict(self.metric.compute())


def call_with_other_lengths(self: Any, p: Tensor, y: Tensor, losses: Tensor) -> None:
    metric, classes = self.metric, torch.tensor([3.0, 1.0, 2.0])
    scores, labels = of_two_classes(p, y)
    metric["flat"](p.flatten() + 0.5, nn.functional.one_hot(y, 3).flatten())
    metric["some"](scores[y != 1], target=labels[y != 1])
    metric["weighted"](p, classes, y)
    for name in ("flat", "some", "weighted"):
        self.log(name, metric[name], on_step=True, on_epoch=True)


class Weighted(Scores):
    """Is given something that is not of samples."""

    def update(self, scores: Tensor, classes: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        super().update((scores * classes).sum(1) / classes[labels])


def with_other_lengths() -> Any:
    return nn.ModuleDict({"flat": BinaryAccuracy(), "some": BinaryAccuracy(), "weighted": Weighted()})


def binary() -> Any:
    kinds = (BinaryAccuracy, BinaryPrecision, BinaryRecall, BinaryAUROC)
    return torchmetrics.MetricCollection([kind() for kind in kinds])


CASES: dict[str, tuple[Step, Callable[[], Any]]] = {
    "step": (logs_value(on_step=True, on_epoch=False, prog_bar=True), nothing),
    "epoch": (logs_value(on_step=False, on_epoch=True), nothing),
    "both": (logs_value(on_step=True, on_epoch=True, prog_bar=True), nothing),
    "by default": (logs_value(), nothing),
    "sum": (lambda s, p, y, losses: s.log("x", losses.sum(), reduce_fx="sum", on_step=True, on_epoch=True), nothing),
    "max": (
        lambda s, p, y, losses: s.log("x", losses.max(), reduce_fx=torch.max, on_step=True, on_epoch=True),
        nothing,
    ),
    "min": (lambda s, p, y, losses: s.log("x", losses.min(), reduce_fx=min, on_step=True, on_epoch=True), nothing),
    "batch size": (
        lambda s, p, y, losses: s.log("x", losses.mean(), on_step=True, on_epoch=True, batch_size=len(y)),
        nothing,
    ),
    "numbers": (lambda s, p, y, losses: s.log("x", losses.mean().item(), on_step=True, on_epoch=True), nothing),
    "many": (many, nothing),
    "twice": (twice, nothing),
    "metric": (call_metric, f1),
    "answer": (log_answer, f1),
    "list states": (log_answer, lambda: MulticlassAUROC(3)),
    "scores or probabilities": (call_binary, binary),
    "scores or probabilities, updated": (update_binary, binary),
    "other lengths": (call_with_other_lengths, with_other_lengths),
    "computed": (update_compute_reset, f1),
    "collection": (log_collection, collection),
    "updated collection": (update_collection, collection),
    "mean of means": (mean_of_means, torchmetrics.MeanMetric),
    "largest": (mean_of_means, torchmetrics.MaxMetric),
    "composed": (log_answer, lambda: f1() + 1),
    "extremes": (log_extremes, lambda: torchmetrics.MinMaxMetric(f1())),
    "of the user": (lambda s, p, y, losses: s.log("x", s.metric(losses), on_step=True, on_epoch=True), Scores),
}


@pytest.fixture(autouse=True)
def few_samples_per_class() -> Iterator[None]:
    """torchmetrics warns of classes that parts of two samples do not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchmetrics.utilities.prints.rank_zero_warn", lambda *args, **kwargs: None)
        yield


@pytest.mark.filterwarnings("ignore:No positive samples in targets", "ignore:No negative samples in targets")
@pytest.mark.parametrize("case", CASES)
def test_everything_that_is_logged_is_that_of_whole_batches(lightning: ModuleType, case: str) -> None:
    step, metrics = CASES[case]
    plain = fit(lightning, make_module(lightning, step, metrics, micro_batches=1))
    split = fit(lightning, make_module(lightning, step, metrics, micro_batches=3))
    assert plain["logger"]
    for place, expected in plain.items():
        assert [set(values) for values in split[place]] == [set(values) for values in expected]
        for values, wanted in zip(split[place], expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-5, abs=1e-6)


class Taken(nn.Module):
    """Keeps the calls that reach the log."""

    def __init__(self, metric: Any = None) -> None:
        super().__init__()
        self.metric = metric
        self.taken: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.taken.append((name, value, options))


def in_parts(module: nn.Module, step: Callable[[int], None], count: int = 2) -> RecordedLogs:
    """What a step logs in each of several micro-batches."""
    logs = RecordedLogs(module)
    with logs.recording():
        for number in range(count):
            with working_on(MicroBatch(number, count)):
                step(number)
    return logs


def test_two_arguments_for_two_samples_stay_two_arguments() -> None:
    module = Taken(BinaryAccuracy())
    scores, labels = torch.tensor([0.9, 0.8, 0.3, -2.0]), torch.tensor([1, 0, 0, 0])

    def step(number: int) -> None:
        module.metric(scores[2 * number : 2 * number + 2], labels[2 * number : 2 * number + 2])

    in_parts(module, step).replay([2, 2], [0.5, 0.5])
    assert module.metric.compute() == BinaryAccuracy()(scores, labels) == 0.5


def test_nothing_is_logged_before_it_is_replayed_and_then_once() -> None:
    module = Taken()
    logs = in_parts(module, lambda number: module.log("x", torch.tensor(number * 1.0), prog_bar=True, batch_size=2))
    assert module.taken == []
    logs.replay([2, 2], [0.5, 0.5])
    assert module.taken == [("x", torch.tensor(0.5), {"prog_bar": True, "batch_size": 4})]
    assert logs.calls == []
    assert "log" not in vars(module)


def test_a_value_that_only_some_micro_batches_log_is_weighed_among_them() -> None:
    module = Taken()

    def step(number: int) -> None:
        if number:
            module.log("rare", float(number))

    in_parts(module, step, count=3).replay([2, 1, 3], [2 / 6, 1 / 6, 3 / 6])
    ((name, value, _),) = module.taken
    assert name == "rare"
    assert value == pytest.approx((1 * 1 + 2 * 3) / 4)


def test_a_count_that_is_no_number_of_samples_weighs_the_values() -> None:
    module = Taken()
    tokens = [30, 10]
    step = in_parts(module, lambda number: module.log("loss", float(number), batch_size=tokens[number]))
    step.replay([1, 1], [0.5, 0.5])
    ((_, value, options),) = module.taken
    assert value == pytest.approx(0.25)
    assert options == {"batch_size": 40}


def test_a_rule_that_was_learned_has_the_last_word() -> None:
    module = Taken()
    logs = in_parts(module, lambda number: module.log("total", 3))
    logs.replay([1, 1], [0.5, 0.5], {"total": Rule("sum")})
    assert module.taken[0][1] == 6


def test_batches_of_a_window_are_logged_one_by_one_with_their_own_values() -> None:
    module = Taken(MulticlassF1Score(3))
    labels = [torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1])]
    guesses = [torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2])]
    alone = [MulticlassF1Score(3)(guesses[number], labels[number]) for number in range(2)]

    def step(number: int) -> None:
        module.log("f1", module.metric(guesses[number], labels[number]))
        module.log("object", module.metric)

    logs = in_parts(module, step)
    for number in range(2):
        logs.replay_one(number, 3)
        assert [name for name, _, _ in module.taken] == ["f1", "object"] * (number + 1)
        assert torch.equal(module.taken[-2][1], alone[number])
        assert module.metric.update_count == number + 1


def test_a_step_that_fails_leaves_metrics_and_log_as_they_were() -> None:
    module = Taken(MulticlassF1Score(3))
    module.metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    before = module.metric.compute().clone()

    def step(number: int) -> None:
        module.metric(torch.tensor([1, 1]), torch.tensor([1, 1]))
        module.log("x", 1.0)
        if number:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        in_parts(module, step)
    assert torch.equal(module.metric.compute(), before)
    assert module.metric.update_count == 1
    assert not {"log", "forward", "reset"} & ({*vars(module)} | {*vars(module.metric)})
    module.metric.update(torch.tensor([2]), torch.tensor([2]))
    assert module.metric.update_count == 2


def test_arguments_of_log_may_be_given_by_position() -> None:
    module = Taken()
    in_parts(module, lambda number: module.log("x", 1.0, True, None, False, True, "sum")).replay([1, 1], [0.5, 0.5])  # type: ignore[call-arg]
    ((_, value, options),) = module.taken
    assert value == 2.0
    assert options == {"prog_bar": True, "logger": None, "on_step": False, "on_epoch": True, "reduce_fx": "sum"}
