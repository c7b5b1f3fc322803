"""What is known to forbid micro-batches before anything has run is said in words that name it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.strategy.options import Options
from autobalance.strategy.parts.splittable import against_overlap, in_words, on_deferred, reasons


@pytest.fixture
def model(lightning: ModuleType) -> Callable[..., Any]:
    """Makes modules, with other layers and other steps if a test wants them."""

    class Model(lightning.LightningModule):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), *layers)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).sum()

    def make(*layers: nn.Module, **overridden: Any) -> Any:
        return type("Model", (Model,), overridden)(*layers)

    return make


@pytest.fixture
def found(trainer: Callable[..., Any]) -> Callable[..., list[str]]:
    """The reasons for a module in `fit`."""

    def find(module: Any, options: Options | None = None, fn: str = "fit", **others: Any) -> list[str]:
        arguments = {name: others.pop(name) for name in ("batch", "optimizers") if name in others}
        made = trainer(accelerator="cpu", devices=1, strategy="auto", **others)
        made.state.fn = fn
        return reasons(made, module, options or Options(), **arguments)

    return find


def test_nothing_speaks_against_a_plain_module(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    assert found(model(nn.LayerNorm(4), nn.Dropout(), nn.InstanceNorm1d(4)), batch=torch.zeros(2, 4)) == []


def test_manual_optimization(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    module = model()
    module.automatic_optimization = False
    (reason,) = found(module)
    assert reason.startswith("`automatic_optimization` is off: only the step itself knows when it runs backward")
    assert found(module, fn="validate") == []


def test_options_of_the_trainer_that_look_for_errors(
    model: Callable[..., Any], found: Callable[..., list[str]]
) -> None:
    (anomaly,) = found(model(), detect_anomaly=True)
    assert anomaly.startswith("`detect_anomaly` is on")
    (quick,) = found(model(), fast_dev_run=True)
    assert quick.startswith("`fast_dev_run` is on")
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert len(found(model())) == 1


@pytest.fixture
def traced() -> Iterator[Callable[[Any], None]]:
    """Sets a trace function for one test."""
    before = sys.gettrace()
    yield sys.settrace
    sys.settrace(before)


def test_a_debugger_that_is_attached(
    model: Callable[..., Any],
    found: Callable[..., list[str]],
    traced: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = model()
    traced(lambda *event: None)
    assert found(module) == ["a debugger is attached, and follows one thread best"]
    tracer = lambda *event: None
    tracer.__module__ = "coverage.pytracer"
    traced(tracer)
    assert found(module) == []
    constants = SimpleNamespace(get_global_debugger=object)
    monkeypatch.setitem(sys.modules, "_pydevd_bundle.pydevd_constants", constants)
    assert found(module) == ["a debugger is attached, and follows one thread best"]
    constants.get_global_debugger = lambda: None  # loaded by a notebook
    assert found(module) == []


def test_a_step_that_stops_in_a_debugger(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        breakpoint()
        return self.layers(batch).sum()

    (reason,) = found(model(training_step=training_step))
    assert reason == "`Model.training_step` stops in a debugger, which follows one thread best"


def test_a_step_that_fetches_its_batches(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    def training_step(self: Any, dataloader_iter: Any) -> Tensor:
        return self.layers(next(dataloader_iter)).sum()

    assert found(model(training_step=training_step)) == [
        "`training_step` takes `dataloader_iter` and fetches its batches itself"
    ]


def test_optimizers_that_run_the_step_again(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    module = model()
    assert found(module, optimizers=[torch.optim.AdamW(module.parameters())]) == []
    (reason,) = found(module, optimizers=[torch.optim.LBFGS(module.parameters())])
    assert reason.startswith("LBFGS runs the step several times for one update")


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_batch_norm_in_training_is_named(
    model: Callable[..., Any], found: Callable[..., list[str]], norm: nn.Module
) -> None:
    (reason,) = found(model(norm.train()))
    assert reason.startswith(f"`layers.1` ({type(norm).__name__}) normalises over the batch")
    assert "batch_norm='deferred'" in reason
    assert found(model(norm), fn="validate") == []
    norm.eval()
    assert found(model(norm)) == []


def test_of_many_batch_norms_a_few_are_named(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    (reason,) = found(model(*(nn.BatchNorm1d(4) for _ in range(5))))
    assert "`layers.3` (BatchNorm1d) and 2 more normalises over the batch" in reason


def test_deferred_batch_norm_is_no_reason_unless_it_is_synchronised(
    model: Callable[..., Any], found: Callable[..., list[str]]
) -> None:
    deferred: Any = SimpleNamespace(batch_norm="deferred")
    assert found(model(nn.BatchNorm1d(4)), deferred) == []
    said = on_deferred(model(nn.BatchNorm1d(4)))
    assert said is not None
    assert said.startswith("`layers.1` (BatchNorm1d) normalises each part of a batch with its own statistics")
    assert on_deferred(model(nn.BatchNorm1d(4).eval())) is None
    (reason,) = found(model(nn.SyncBatchNorm(4)), deferred)
    assert reason.startswith("`layers.1` (SyncBatchNorm) cannot be deferred")


def test_instance_norm_that_tracks_statistics_is_named(
    model: Callable[..., Any], found: Callable[..., list[str]]
) -> None:
    assert found(model(nn.InstanceNorm1d(4, track_running_stats=True))) == [
        "`layers.1` (InstanceNorm1d) tracks statistics of the batch"
    ]


def test_batches_that_cannot_be_split(model: Callable[..., Any], found: Callable[..., list[str]]) -> None:
    assert found(model(), batch=torch.zeros(1, 4)) == ["a batch has one sample"]
    (reason,) = found(model(), batch=(torch.zeros(4, 2), torch.zeros(3)))
    assert "different first dimensions" in reason


def test_whole_batches_side_by_side_need_no_batch_that_can_be_split(
    model: Callable[..., Any], trainer: Callable[..., Any]
) -> None:
    made = trainer(accelerator="cpu", devices=1, strategy="auto")
    made.state.fn = "fit"
    assert against_overlap(made, model(nn.BatchNorm1d(4))) == []


def test_the_user_is_told_in_one_sentence() -> None:
    assert in_words(["one.", "two"]) == (
        "Batches are not split into micro-batches, and one device works at a time: one; two."
    )
