"""Runs go on where memory runs out, and learn what they would have learned; where they cannot, they say why."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import Allocations, shrink, watch_allocations
from models import loader
from threads import no_thread_left
from torch import Tensor, nn

import autobalance
from autobalance.execution.micro_batch import current_micro_batch

pytestmark = pytest.mark.usefixtures("simulated")

STEPS, WIDTH, CLASSES = 4, 16, 3


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    return watch_allocations(monkeypatch)


def eventful(lightning: ModuleType, allocations: Allocations, optimizer: Any = torch.optim.AdamW) -> Any:
    """A model whose steps draw random numbers and change buffers, a metric, logged values and its own attributes."""
    from torchmetrics.classification import MulticlassAccuracy

    class Eventful(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(4)
            )
            self.head = nn.Linear(WIDTH, CLASSES)
            self.accuracy = MulticlassAccuracy(CLASSES)
            self.losses: list[float] = []
            self.seen: list[int] = []
            self.calls = 0

        def self_balance(self) -> list[nn.Module]:
            return [*self.layers, self.head]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            self.seen.append(batch_idx)
            x, labels = batch
            with allocations.counting():
                for layer in self.layers:
                    x = x + layer(x)
                scores = self.head(x)
                loss = F.cross_entropy(scores, labels)
                self.accuracy(scores, labels)
                self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
                self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def backward(self, *args: Any, **kwargs: Any) -> None:
            with allocations.counting():
                super().backward(*args, **kwargs)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    return Eventful()


def batches(count: int = STEPS, samples: int = 8) -> Any:
    drawn = torch.Generator().manual_seed(1)
    return loader(
        [
            (torch.randn(samples, WIDTH, generator=drawn), torch.randint(CLASSES, (samples,), generator=drawn))
            for _ in range(count)
        ]
    )


def outcome(made: Any, model: Any) -> dict[str, Any]:
    """All that a run leaves: losses, weights and buffers, optimizer state, logged values, the model's attributes."""
    state = made.optimizers[0].state_dict()["state"]
    return {
        "losses": model.losses,
        "seen": model.seen,
        "calls": model.calls,
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "optimizer": {
            index: {key: torch.as_tensor(value).tolist() for key, value in each.items()}
            for index, each in state.items()
        },
        "logged": {name: float(value) for name, value in made.callback_metrics.items()},
        "zero_grad": made.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
        "step": made.global_step,
        "random": torch.rand(3).tolist(),
    }


def fit(make_trainer: Callable[..., Any], model: Any, data: Any = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    plan, parts = options.pop("plan", None), options.pop("micro_batches", 1)
    made = make_trainer(strategy=autobalance.SelfBalanceStrategy(plan=plan, micro_batches=parts), **options)
    made.fit(model, data or batches())
    return made, outcome(made, model)


# A run in which nothing fails, of each package: its plan, what it leaves, and how often it allocates.
UNDISTURBED: dict[str, tuple[Any, dict[str, Any], int]] = {}


@pytest.fixture
def undisturbed(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations
) -> tuple[Any, dict[str, Any], int]:
    if lightning.__name__ not in UNDISTURBED:
        before = [torch.simulated.memory_allocated(index) for index in range(4)]
        made, left = fit(trainer, eventful(lightning, allocations))
        # What metrics compute is in no trial: with it in the plan, no failure is the plan's fault.
        reached = [torch.simulated.max_memory_allocated(index) - before[index] for index in range(4)]
        UNDISTURBED[lightning.__name__] = made.strategy.plan.with_peaks(reached), left, allocations.count
        allocations.count = 0
    return UNDISTURBED[lightning.__name__]


def out_of_memory(account: int, nbytes: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"simulated:{account} out of memory. Tried to allocate {nbytes} bytes.")


@pytest.mark.parametrize("which", range(20))
def test_a_batch_that_runs_out_of_memory_runs_again_as_if_nothing_had_been(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any, which: int
) -> None:
    plan, expected, count = undisturbed
    number = random.Random(f"fails {which}").randint(1, count)
    allocations.fails = lambda count: count == number
    with pytest.warns(UserWarning, match=r"Out of memory in training batch \d of epoch 0\. simulated:\d held .* more"):
        made, found = fit(trainer, eventful(lightning, allocations), plan=plan)
    assert allocations.failed == 1
    assert made.strategy.plan.assignment == plan.assignment
    assert found == expected


@pytest.mark.parametrize("which", range(10))
def test_a_run_goes_on_with_less_memory_as_if_it_had_begun_with_the_last_plan(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any, which: int
) -> None:
    plan, expected, count = undisturbed
    number = random.Random(f"less {which}").randint(1, count)

    def take_memory(account: int, nbytes: int) -> None:
        """Another process takes a tenth of what the device was planned to hold, or all that is not in use."""
        shrink(account, max(torch.simulated.memory_allocated(account), plan.peaks[account] * 9 // 10))
        raise out_of_memory(account, nbytes)

    allocations.fails, allocations.on_failure = (lambda count: count == number), take_memory
    told = r"the plan was made again \(.*moves?: .* from device \d to \d"
    with autobalance.simulate([4 * peak for peak in plan.peaks]), pytest.warns(UserWarning, match=told):
        made, found = fit(trainer, eventful(lightning, allocations), plan=plan)
    assert allocations.failed == 1
    assert made.strategy.plan.assignment != plan.assignment
    allocations.fails = lambda count: False
    assert found == fit(trainer, eventful(lightning, allocations), plan=made.strategy.plan)[1]
    assert found == expected  # where only places change, nothing else does


def test_three_failures_in_a_row_are_the_users_error(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any
) -> None:
    allocations.fails = lambda count: count > 20
    model = eventful(lightning, allocations)
    told = r"(?s)out of memory.*\n  3\. .*That were 3 failures in a row"
    with pytest.warns(UserWarning, match="is run again"), pytest.raises(torch.OutOfMemoryError, match=told):
        fit(trainer, model, plan=undisturbed[0])
    assert allocations.failed == 3
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_nothing_is_repeated_where_the_user_does_not_want_it(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any
) -> None:
    allocations.fails = lambda count: count > 20
    made = trainer(strategy=autobalance.SelfBalanceStrategy(plan=undisturbed[0], retry_on_oom=False))
    with pytest.raises(torch.OutOfMemoryError):
        made.fit(eventful(lightning, allocations), batches())
    assert allocations.failed == 1


def failing_once(before: bool) -> type[torch.optim.Optimizer]:
    """An AdamW whose third step runs out of memory: before it has changed anything, or after."""

    class Failing(torch.optim.AdamW):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            loss = closure()
            type(self).steps += 1
            if before and self.steps == 3:
                raise out_of_memory(0, 512)
            super().step()
            if not before and self.steps == 3:
                raise out_of_memory(0, 512)
            return loss

    return Failing


def test_an_optimizer_step_that_has_changed_nothing_runs_again(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any
) -> None:
    plan, expected, _ = undisturbed
    with pytest.warns(UserWarning, match="Out of memory in training batch 2 of epoch 0"):
        found = fit(trainer, eventful(lightning, allocations, failing_once(before=True)), plan=plan)[1]
    assert found == expected


@pytest.mark.both_packages
def test_half_an_optimizer_step_stops_the_run_and_the_last_checkpoint_is_whole(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any, tmp_path: Path
) -> None:
    checkpoints = lightning.pytorch if hasattr(lightning, "pytorch") else lightning
    saving = checkpoints.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    model = eventful(lightning, allocations, failing_once(before=False))
    told = r"(?s)some weights or optimizer state are updated and others are not.*last\.ckpt.* continues from it"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        fit(trainer, model, plan=undisturbed[0], callbacks=[saving], enable_checkpointing=True)

    whole = torch.load(saving.last_model_path, weights_only=False)
    assert whole["global_step"] == 2
    after_two, expected = eventful(lightning, allocations), eventful(lightning, allocations)
    after_two.load_state_dict(whole["state_dict"])
    fit(trainer, expected, batches(2), plan=undisturbed[0])
    for name, value in expected.state_dict().items():
        assert torch.equal(after_two.state_dict()[name], value), name


def test_memory_of_the_optimizer_step_is_asked_for_before_it(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any
) -> None:
    """Another process takes memory at the end of the first backward: optimizer state does not fit any more."""
    plan, expected, _ = undisturbed
    model, seen = eventful(lightning, allocations), []

    def after_backward(self: Any) -> None:
        if not seen:
            device = max(range(4), key=lambda index: plan.peaks[index])
            shrink(device, torch.simulated.memory_allocated(device) + 1024)
        seen.append(self.layers[0][0].weight._version)

    type(model).on_after_backward = after_backward
    told = "the optimizer step goes on from there"
    with autobalance.simulate([4 * peak for peak in plan.peaks]), pytest.warns(UserWarning, match=told):
        made, found = fit(trainer, model, plan=plan)
    assert made.strategy.plan.assignment != plan.assignment
    assert found == expected


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gradients_of_earlier_batches_in_a_window_are_kept_or_the_run_stops(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, undisturbed: Any, phase: str
) -> None:
    plan = undisturbed[0]
    expected = fit(trainer, eventful(lightning, allocations), plan=plan, accumulate_grad_batches=2)[1]
    forward, both = [], []
    model = eventful(lightning, allocations)
    type(model).on_before_backward = lambda self, loss: forward.append(allocations.count)
    allocations.count = 0
    fit(trainer, model, batches(2), plan=plan, accumulate_grad_batches=2)
    both.append(allocations.count)
    allocations.count = 0
    last = forward[1] - 2 if phase == "forward" else both[0] - 1
    allocations.fails = lambda count: count == last
    if phase == "forward":
        with pytest.warns(UserWarning, match="Out of memory in training batch 1"):
            found = fit(trainer, eventful(lightning, allocations), plan=plan, accumulate_grad_batches=2)[1]
        assert found == expected
    else:
        told = "gradients have been added in part to those of the batches before it"
        with pytest.raises(torch.OutOfMemoryError, match=told):
            fit(trainer, eventful(lightning, allocations), plan=plan, accumulate_grad_batches=2)


@pytest.mark.parametrize("run", ["validate", "predict"])
def test_evaluation_runs_a_batch_again(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations, run: str
) -> None:
    def evaluated(fails: Callable[[int], bool]) -> Any:
        model = eventful(lightning, allocations)

        def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            x, labels = batch
            with allocations.counting():
                for layer in self.layers:
                    x = x + layer(x)
            if run == "validate":
                self.accuracy(self.head(x), labels)
                self.log("accuracy", self.accuracy)
            return self.head(x)

        setattr(type(model), {"validate": "validation_step", "predict": "predict_step"}[run], step)
        allocations.count, allocations.fails = 0, fails
        made = trainer()
        return made.validate(model, batches(), verbose=False) if run == "validate" else made.predict(model, batches())

    expected = evaluated(lambda count: False)
    with pytest.warns(UserWarning, match=f"Out of memory in a batch of {run}"):
        found = evaluated(lambda count: count == 30)
    if run == "validate":
        assert found == expected
    else:
        assert len(found) == len(expected) == STEPS
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Chain(nn.Module):
    """Six linear blocks without anything that couples samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def self_balance(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def chain(lightning: ModuleType, before_loss: Callable[[Any], None] = lambda module: None) -> Any:
    class Model(Chain, lightning.LightningModule):
        calls = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            type(self).calls += 1
            outputs = self(batch)
            before_loss(self)
            return outputs.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Model()


def samples(*sizes: int) -> Any:
    drawn = torch.Generator().manual_seed(1)
    return loader([torch.randn(size, WIDTH, generator=drawn) for size in sizes])


def pipelined(trainer: Callable[..., Any], **options: Any) -> Any:
    strategy = autobalance.SelfBalanceStrategy(micro_batches=8, schedule="1f1b")
    return trainer(strategy=strategy, **options)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_one_of_eight_micro_batches_is_the_users_own(
    lightning: ModuleType, trainer: Callable[..., Any], kind: type[BaseException]
) -> None:
    def fails_in_the_third(module: Any) -> None:
        running = current_micro_batch()
        if module.armed and running is not None and (running.index, running.count) == (2, 8):
            raise kind("in the user's own step")

    def on_train_start(self: Any) -> None:
        self.armed = self.fails  # not before: the plan is made by trials of the same step

    model = chain(lightning, fails_in_the_third)
    type(model).on_train_start = on_train_start
    model.armed = model.fails = False
    pipelined(trainer).fit(model, samples(16))
    model.fails = True
    with no_thread_left(), pytest.raises((kind, SystemExit)) as caught:
        pipelined(trainer).fit(model, samples(16))
    if kind is ZeroDivisionError:
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "fails_in_the_third" in names
        assert "training_step" in names
    model.armed = model.fails = False
    made = pipelined(trainer)
    with no_thread_left():
        made.fit(model, samples(16, 16))  # the next step works
    assert made.global_step == 2


def test_a_micro_batch_that_runs_out_of_memory_has_its_batch_run_again(
    lightning: ModuleType, trainer: Callable[..., Any], allocations: Allocations
) -> None:
    def run(number: int) -> dict[str, Tensor]:
        model, made = chain(lightning), pipelined(trainer)
        inner = type(model).forward

        def counted(self: Any, x: Tensor) -> Tensor:
            with allocations.counting():
                return inner(self, x)

        type(model).forward = counted
        allocations.count, allocations.failed, allocations.fails = 0, 0, lambda count: count == number
        with no_thread_left():
            made.fit(model, samples(16, 16))
        assert made.strategy.plan.micro_batches == 8
        return model.state_dict()

    expected = run(0)
    with pytest.warns(UserWarning, match="Out of memory in training batch"):
        found = run(allocations.count - 20)
    assert allocations.failed == 1
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.both_packages
def test_a_trainer_that_should_stop_stops_after_the_step(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    def stops(module: Any) -> None:
        if module.trainer is not None and hasattr(module.trainer, "should_stop"):
            module.trainer.should_stop = True

    made = pipelined(trainer)
    made.fit(chain(lightning, stops), samples(16, 16, 16))
    assert made.global_step == 1


def test_a_longer_batch_at_step_fifty_is_spoken_of_or_planned_for(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str]
) -> None:
    data = samples(*[4] * 50, 64, 4)

    def run(**options: Any) -> tuple[Any, Any]:
        model = chain(lightning)
        made = trainer(strategy=autobalance.SelfBalanceStrategy(micro_batches=1, **options))
        made.fit(model, data)
        return made.strategy.plan, model.state_dict()

    with pytest.warns(
        UserWarning, match="This batch has 1,024 elements, but the plan was made for batches of up to 64"
    ):
        run()
    planned, expected = run(worst_batch="scan:52")
    with autobalance.simulate(list(planned.peaks)):
        found, weights = run(rebalance=True)
        assert all(torch.simulated.max_memory_allocated(index) <= planned.peaks[index] for index in range(4))
    assert found.peaks == planned.peaks
    assert any("this batch has 1,024 elements" in said and "the plan was made again" in said for said in messages)
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
