"""Every private name of Lightning still does what autobalance relies on; a failure here names what moved."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from autobalance import compat

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning"),
]


@pytest.fixture(params=["pytorch_lightning", "lightning.pytorch"])
def lightning(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = importlib.import_module(request.param)
    return module


def make_trainer(lightning: ModuleType, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options})


def make_model(lightning: ModuleType) -> Any:
    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            return batch + 1

        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            return batch * 2

    return Model()


def data() -> DataLoader[Any]:
    return DataLoader(torch.ones(4, 4), batch_size=2)  # type: ignore[arg-type]  # a tensor is a dataset


def during_fit(lightning: ModuleType, look: Callable[[Any, Any], None], **options: Any) -> None:
    """Call `look(trainer, model)` at the setup of a fit, and let the fit go on."""
    model = make_model(lightning)

    class Look(lightning.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            look(trainer, module)

    make_trainer(lightning, callbacks=[Look()], **options).fit(model, data())


def test_a_module_says_the_device_that_it_is_told(lightning: ModuleType) -> None:
    model = make_model(lightning)
    model.layer.inner = make_model(lightning)
    compat.set_lightning_device(model, torch.device("meta"))
    assert model.device == model.layer.inner.device == torch.device("meta")
    assert model.layer.weight.device.type == "cpu"


def test_loaders_are_those_given_to_the_trainer_or_made_by_the_module(lightning: ModuleType) -> None:
    given = data()
    model = make_model(lightning)
    type(model).val_dataloader = lambda self: [1, 2]
    type(model).validation_step = lambda self, batch, batch_idx: None
    found: dict[str, Any] = {}

    class Look(lightning.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            found["train"] = compat.request_loaders(lightning.__name__, trainer.fit_loop)
            found["test"] = compat.request_loaders(lightning.__name__, trainer.test_loop)
            found["validate"] = compat.request_loaders(lightning.__name__, trainer.fit_loop.epoch_loop.val_loop)
            found["owners"] = compat.data_owners(trainer)

    make_trainer(lightning, callbacks=[Look()], limit_val_batches=0).fit(model, given)
    assert found["train"] is given
    assert found["test"] is None
    assert found["validate"] == [1, 2]
    assert {id(owner) for owner in found["owners"]} == {id(given), id(model)}


def test_asking_for_the_number_of_steps_leaves_no_loader_attached(lightning: ModuleType) -> None:
    def look(trainer: Any, module: Any) -> None:
        before = dict(vars(trainer.fit_loop))
        with compat.loader_attachment_kept(trainer):
            assert trainer.estimated_stepping_batches == 2
            assert trainer.train_dataloader is not None
        assert trainer.train_dataloader is None
        assert vars(trainer.fit_loop) == before

    during_fit(lightning, look)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_fresh_iterator_leaves_persistent_workers_alone() -> None:
    source = DataLoader(list(range(4)), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    running = iter(source)
    assert next(running) == 0
    assert next(compat.fresh_iterator(source)) == 0
    assert next(running) == 1
    assert next(compat.fresh_iterator([7])) == 7


def test_loaders_in_turn_are_told_from_loaders_together(lightning: ModuleType) -> None:
    combined = importlib.import_module(f"{lightning.__name__}.utilities.combined_loader").CombinedLoader
    assert compat.gives_one_after_the_other(combined([[1], [2]], "sequential"))
    assert not compat.gives_one_after_the_other(combined([[1], [2]], "max_size"))


def test_epochs_without_backward_are_known(lightning: ModuleType) -> None:
    trainer = make_trainer(lightning)
    assert not compat.skips_backward(trainer)
    trainer.fit_loop._skip_backward = True
    assert compat.skips_backward(trainer)
    assert trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def test_what_a_trainer_has_chosen_can_be_seen_and_changed(lightning: ModuleType) -> None:
    seen: list[tuple[Any, ...]] = []
    plugin = lightning.plugins.MixedPrecision("bf16-mixed", device="cpu")

    def check(choice: compat.TrainerChoice) -> None:
        seen.append((choice.package, choice.devices, choice.precision, choice.precision_plugin))
        assert isinstance(choice.accelerator, lightning.accelerators.CPUAccelerator)
        choice.use_precision(plugin)
        choice.use_root_device(torch.device("meta"))

    connector = importlib.import_module(f"{lightning.__name__}.trainer.connectors.accelerator_connector")
    before = connector._AcceleratorConnector._init_strategy
    connector._AcceleratorConnector._init_strategy = getattr(before, "__wrapped__", before)
    try:
        compat.call_before_strategy_is_chosen(lightning.__name__, check)
        compat.call_before_strategy_is_chosen(lightning.__name__, check)  # once is enough
        trainer = make_trainer(lightning)
    finally:
        connector._AcceleratorConnector._init_strategy = before
    assert seen == [(lightning.__name__, [torch.device("cpu")], "32-true", None)]
    assert trainer.precision_plugin is plugin
    assert trainer.strategy.root_device == torch.device("meta")


def test_optimizers_and_schedulers_are_read_from_the_module(lightning: ModuleType) -> None:
    def look(trainer: Any, module: Any) -> None:
        (optimizer,), (scheduler,) = compat.configured_optimizers(lightning.__name__, module)
        assert isinstance(optimizer, torch.optim.SGD)
        assert scheduler.scheduler.optimizer is optimizer

    during_fit(lightning, look)


def test_a_wrapped_optimizer_steps_through_its_strategy(lightning: ModuleType) -> None:
    calls: list[Any] = []

    class Strategy:
        def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> None:
            calls.append(optimizer)

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    strategy = Strategy()  # is held weakly
    compat.lightning_optimizer(lightning.__name__, optimizer, strategy).step()
    assert calls == [optimizer]


def test_closures_keep_the_loss_until_it_is_consumed(lightning: ModuleType) -> None:
    closure_class, result_class = compat.closure_classes(lightning.__name__)
    loss = torch.ones((), requires_grad=True)
    order: list[str] = []
    closure = closure_class(
        step_fn=lambda: order.append("step") or result_class.from_training_step_output(loss, 4),
        backward_fn=lambda value: order.append(f"backward {value.item()}"),
        zero_grad_fn=lambda: order.append("zero"),
    )
    assert closure() == 0.25
    assert order == ["step", "zero", "backward 0.25"]
    assert closure.consume_result().asdict()["loss"] == 0.25


def test_batches_go_through_the_users_hooks(lightning: ModuleType) -> None:
    def look(trainer: Any, module: Any) -> None:
        moved = compat.transferred_batch(module, torch.ones(2), torch.device("meta"), 0)
        assert moved.is_meta
        assert compat.transferred_batch(module, torch.ones(2), torch.device("cpu"), 0).tolist() == [4.0, 4.0]

    during_fit(lightning, look)


def test_precision_of_a_trial_is_its_own(lightning: ModuleType) -> None:
    plugin = lightning.plugins.MixedPrecision("bf16-mixed", device="cuda")
    twin = compat.trial_precision(plugin, torch.device("cpu"))
    assert (twin.device, plugin.device) == ("cpu", "cuda")
    scaled = lightning.plugins.MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
    twin = compat.trial_precision(scaled, torch.device("cpu"))
    assert twin.scaler is not scaled.scaler
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    twin.scaler.scale(parameter.sum() * float("inf")).backward()
    twin.scaler.step(optimizer)
    assert not torch.isfinite(parameter)  # a trial's step is never skipped


def test_a_newer_torch_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.backend, "_torch_is_checked", False)
    monkeypatch.setattr(torch, "__version__", "97.1.0+cpu")
    with pytest.warns(UserWarning, match=r"torch 97.1.0\+cpu is newer than \d+\.\d+, the newest release"):
        compat.warn_if_torch_is_untested()
    compat.warn_if_torch_is_untested()


def test_a_tested_torch_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.backend, "_torch_is_checked", False)
    compat.warn_if_torch_is_untested()


def test_logged_values_are_collected_as_the_trainer_does(lightning: ModuleType) -> None:
    collection = compat.result_collection(lightning.__name__, training=True)
    for value in (1.0, 3.0):
        collection.log("training_step", "x", torch.tensor(value), on_step=True, on_epoch=True, batch_size=1)
    assert collection.metrics(on_step=True)["callback"]["x_step"] == 3.0
    assert collection.metrics(on_step=False)["log"]["x_epoch"] == 2.0
    collection.reset(metrics=False)
    assert not collection.metrics(on_step=True)["callback"]


def test_hooks_that_are_overridden_run_in_a_context(lightning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    call = importlib.import_module(f"{lightning.__name__}.trainer.call")
    for name in ("_call_lightning_module_hook", "_call_callback_hooks"):
        plain = getattr(call, name)
        monkeypatch.setattr(call, name, getattr(plain, "__wrapped__", plain))
    monkeypatch.setattr(call, "_wrapped_by_autobalance", True, raising=False)
    monkeypatch.delattr(call, "_wrapped_by_autobalance")
    entered: list[Any] = []
    seen: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def context(trainer: Any) -> Iterator[None]:
        entered.append(trainer)
        yield
        entered.pop()

    class Watch(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(("callback", len(entered)))

    compat.call_around_hooks(lightning.__name__, context)
    compat.call_around_hooks(lightning.__name__, context)  # once is enough
    model = make_model(lightning)
    type(model).on_train_start = lambda self: seen.append(("module", len(entered)))
    model.layer.register_forward_hook(lambda *_: seen.append(("step", len(entered))))
    make_trainer(lightning, callbacks=[Watch()], max_steps=1).fit(model, data())
    assert seen == [("callback", 1), ("module", 1), ("step", 0)]


def test_a_trainer_tells_whether_it_detects_anomalies(lightning: ModuleType) -> None:
    assert compat.detects_anomalies(make_trainer(lightning, detect_anomaly=True))
    assert not compat.detects_anomalies(make_trainer(lightning))


def test_a_step_can_be_called_around_and_what_it_logs_put_back(lightning: ModuleType) -> None:
    model, seen = make_model(lightning), []

    def step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        put_back = compat.logged_values(self.trainer, lambda value: lambda: value)
        self.log("loss", batch.sum(), on_epoch=True)
        if batch_idx == 1:
            assert any("value" in held for held in compat.logged_tensors(self.trainer) if isinstance(held, dict))
            put_back()
        return self.layer(batch).sum()

    type(model).training_step = step

    class Around(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.undo = compat.call_around_closures(trainer, self.around)

        def around(self, closure: Callable[[], Any], batch: Any) -> Any:
            seen.append([value.shape for value in batch if isinstance(value, Tensor)])
            return closure()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.undo()

    trainer = make_trainer(lightning, callbacks=[Around()], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(torch.ones(4, 4), 2))
    assert seen == [[torch.Size([2, 4])]] * 2  # in a batch that only accumulates, too
    # Batches are (1 + 1) * 2 in each of 8 elements; what the second has logged was taken back.
    assert float(trainer.callback_metrics["loss_epoch"]) == 32
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


def test_a_gradient_scaler_forgets_that_it_has_unscaled(lightning: ModuleType) -> None:
    scaler = torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    plugin = lightning.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)
    for _ in range(2):  # the second would be refused
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        compat.forget_unscaling(plugin, optimizer)


@pytest.mark.parametrize("has_length", [True, False])
def test_batches_are_taken_ahead_of_their_turn_once_and_put_back_as_they_were_loaded(
    lightning: ModuleType, has_length: bool
) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(data)

    class Ahead(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 0:
                taken.extend(compat.take_ahead(trainer, 2, prepare))
                undo.append(compat.leave_prepared_alone(module, lambda given: any(given is each for each in taken)))
            if batch_idx == 2:
                compat.put_back(trainer, lambda given: given)
                undo.pop()()

    def prepare(batch: Tensor) -> Tensor:
        loaded.append(batch.clone())
        return compat.transferred_by_loop(trainer, batch)

    data = torch.arange(5.0).repeat_interleave(4).view(5, 4)
    loaded: list[Tensor] = []
    taken: list[Tensor] = []
    given: list[Tensor] = []
    undo: list[Callable[[], None]] = []
    model = make_model(lightning)
    model.on_before_batch_transfer = lambda batch, dataloader_idx: batch + 1
    model.on_after_batch_transfer = lambda batch, dataloader_idx: batch
    model.training_step = lambda batch, batch_idx: given.append(batch) or model.layer(batch).sum()
    trainer = make_trainer(lightning, callbacks=[Ahead()])
    trainer.fit(model, DataLoader(list(data) if has_length else Stream(), batch_size=None))
    assert [float(batch[0]) for batch in loaded] == [1, 2]
    assert [float(batch[0]) for batch in given] == [1, 2, 3, 4, 5]  # each through the hook once
