"""What cannot be split trains whole, says so once with the reason, and trains as in plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autobalance.strategy.planning import checked
from autobalance.strategy.registration import strategy_class

pytestmark = pytest.mark.usefixtures("simulated")

WIDTH = 6


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.arange(24) % 3), batch_size=8)


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), *more, nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Contrastive:
    """Each sample is to be unlike all others of its batch, of which there are as many pairs as samples squared."""

    automatic = True

    def build(self, module: Any) -> None:
        module.net, module.head = layers(), nn.Linear(WIDTH, 4)

    def step(self, module: Any, x: Tensor, y: Tensor) -> Any:
        code = functional.normalize(module.head(module.net(x)), dim=1)
        return functional.cross_entropy(5 * code @ code.T, torch.arange(len(code), device=code.device))


class Normalised:
    """A classifier with batch norm."""

    automatic = True

    def build(self, module: Any) -> None:
        module.net, module.head = layers(nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, 3)

    def step(self, module: Any, x: Tensor, y: Tensor) -> Any:
        return functional.cross_entropy(module.head(module.net(x)), y)


class Adversarial:
    """A GAN that steps both of its optimizers itself."""

    automatic = False

    def build(self, module: Any) -> None:
        module.net, module.head = layers(), nn.Linear(WIDTH, 1)

    def step(self, module: Any, x: Tensor, y: Tensor) -> Any:
        makes, tells = module.optimizers()
        for optimizer, wanted in ((makes, 1.0), (tells, 0.0)):
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            guessed = module.head(module.net(x))
            module.manual_backward(
                functional.binary_cross_entropy_with_logits(guessed, torch.full_like(guessed, wanted))
            )
            optimizer.step()
            module.untoggle_optimizer(optimizer)


REASONS = {
    Contrastive: "does not grow evenly",
    Normalised: "`net.2` (BatchNorm1d) normalises over the batch",
    Adversarial: "`automatic_optimization` is off",
}


def make(lightning: ModuleType, kind: Any) -> Any:
    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            kind.build(self)
            self.automatic_optimization = kind.automatic
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return kind.step(self, *batch)

        def configure_optimizers(self) -> Any:
            if kind.automatic:
                return torch.optim.Adam(self.parameters(), 0.01)
            return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.net, self.head)]

    return Net()


@pytest.mark.parametrize("kind", REASONS)
def test_it_trains_as_plain_lightning_and_says_once_why_it_is_not_split(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], kind: Any
) -> None:
    plain, split = make(lightning, kind()), make(lightning, kind())
    trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=2).fit(plain, loader())
    strategy = strategy_class((lightning.__name__,))(micro_batches=4, schedule="1f1b")
    made = trainer(strategy=strategy, max_epochs=2)
    made.fit(split, loader())
    assert made.strategy.plan.micro_batches == 1
    assert sum(REASONS[kind] in message for message in messages) == 1, messages
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)


class Paired:
    """Samples come in pairs: there is no half of one."""

    automatic = True

    def build(self, module: Any) -> None:
        module.net, module.head = layers(), nn.Linear(WIDTH, 3)

    def step(self, module: Any, x: Tensor, y: Tensor) -> Any:
        one, other = module.head(module.net(x)).view(-1, 2, 3).unbind(1)
        return functional.mse_loss(one, other)


class Skipping(Paired):
    """A step that skips batches without a sample of the first kind."""

    def step(self, module: Any, x: Tensor, y: Tensor) -> Any:
        if not (y == 0).any():
            return None
        return functional.cross_entropy(module.head(module.net(x)), y)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Paired, "RuntimeError: shape '[-1, 2, 3]' is invalid"), (Skipping, "returned no loss for")]
)
def test_a_step_that_does_not_run_on_parts_takes_batches_whole(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], kind: Any, reason: str
) -> None:
    plain, split = make(lightning, kind()), make(lightning, kind())
    trainer(accelerator="cpu", devices=1, strategy="auto").fit(plain, loader())
    strategy = strategy_class((lightning.__name__,))(micro_batches=8, schedule="1f1b")
    trainer(strategy=strategy).fit(split, loader())
    assert strategy.plan.micro_batches == 1
    assert sum("does not run on parts of a batch" in said and reason in said for said in messages) == 1, messages
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_more_parts_than_samples_take_batches_whole(
    trainer: Callable[..., Any], messages: list[str], lightning: Any
) -> None:
    strategy = strategy_class((lightning.__name__,))(micro_batches=9, schedule="1f1b")
    trainer(strategy=strategy).fit(make(lightning, Paired()), loader())
    assert strategy.plan.micro_batches == 1
    assert sum("9 parts are more than the 8 samples of a batch" in said for said in messages) == 1, messages


def test_an_error_of_the_planner_is_not_told_as_one_of_the_step(
    lightning: ModuleType, trainer: Callable[..., Any], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*asked: Any, **options: Any) -> None:
        raise ValueError("event 3: storage 5 dies while it is not alive")

    monkeypatch.setattr(checked, "search", broken)
    strategy = strategy_class((lightning.__name__,))(micro_batches=8, schedule="1f1b")
    with pytest.raises(ValueError, match="storage 5 dies while it is not alive"):
        trainer(strategy=strategy).fit(make(lightning, Paired()), loader())
    assert not any("does not run on parts" in said for said in messages)
