"""What users and callbacks do between steps works on a model that is spread over devices, as on the CPU."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.usefixtures("simulated")

WIDTH = 8


def data() -> DataLoader[Any]:
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(inputs, batch_size=4)  # type: ignore[arg-type]  # a tensor is a dataset


def follow(module: Any) -> None:
    """The slow network goes a step towards the quick one, each of its blocks on any device."""
    with torch.no_grad():
        for slow, quick in zip(module.slow.parameters(), module.quick.parameters(), strict=True):
            slow.lerp_(quick, 0.1)


def norm_of_gradients(module: Any) -> None:
    total = torch.stack([weight.grad.norm() for weight in module.quick.parameters()]).norm()
    module.norms.append(float(total))


def follow_after_step(module: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    optimizer.step(closure=closure)
    follow(module)


def lightnings_norm(module: Any, optimizer: Any) -> None:
    utilities = importlib.import_module(f"{module.lightning}.utilities")
    module.norms.append(float(utilities.grad_norm(module.quick, 2)["grad_2.0_norm_total"]))


def clip(module: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    norm_of_gradients(module)
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)


HOOKS: dict[str, dict[str, Callable[..., Any]]] = {
    "after the batch": {"on_train_batch_end": lambda module, *rest: follow(module)},
    "before gradients are zeroed": {"on_before_zero_grad": lambda module, optimizer: follow(module)},
    "after the optimizer's step": {"optimizer_step": follow_after_step},
    "after the epoch": {"on_train_epoch_end": follow},
    "norm of gradients": {"on_before_optimizer_step": lambda module, optimizer: norm_of_gradients(module)},
    "Lightning's norms of gradients": {"on_before_optimizer_step": lightnings_norm},
    "clipping by hand": {"configure_gradient_clipping": clip},
}


def make(lightning: ModuleType, hooks: dict[str, Any]) -> Any:
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.lightning = lightning.__name__
            torch.manual_seed(0)
            self.quick = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            self.slow = copy.deepcopy(self.quick).requires_grad_(False)
            self.norms: list[float] = []

        def self_balance(self) -> list[nn.Module]:
            return [*self.quick, *reversed(self.slow)]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return F.mse_loss(self.quick(batch), self.slow(batch).detach() + 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], lr=0.1)

    return type("Hooked", (Net,), hooks)()


@pytest.mark.both_packages
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_of_the_module(lightning: ModuleType, trainer: Callable[..., Any], hooks: str) -> None:
    split, plain = make(lightning, HOOKS[hooks]), make(lightning, HOOKS[hooks])
    split_trainer = trainer()
    split_trainer.fit(split, data())
    trainer(accelerator="cpu", devices=1, strategy="auto").fit(plain, data())
    assert len(set(split_trainer.strategy.plan.assignment)) == 4
    torch.testing.assert_close(split.state_dict(), plain.state_dict())
    assert split.norms == pytest.approx(plain.norms)


@pytest.mark.both_packages
def test_callbacks(lightning: ModuleType, trainer: Callable[..., Any]) -> None:
    class Follow(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            follow(module)

    class Unfreeze(importlib.import_module(f"{lightning.__name__}.callbacks").BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.quick[:2])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.quick[:2], optimizer)

    def fit(**options: Any) -> Any:
        model = make(lightning, {})
        trainer(max_epochs=2, callbacks=[Follow(), Unfreeze()], **options).fit(model, data())
        return model.state_dict()

    with pytest.warns(UserWarning, match="have become trainable since the plan was made"):
        split = fit()
    torch.testing.assert_close(split, fit(accelerator="cpu", devices=1, strategy="auto"))
