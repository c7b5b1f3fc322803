"""What stands for the Trainer, its strategy and its logger in a trial: the copy's own, with the real settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autobalance import compat
from autobalance.profiling.trial import Glue, Mark
from autobalance.strategy.parts.early_gradients import EarlyGradients


class TrialTrainer:
    """Stands for the Trainer in a trial: what is not said otherwise is asked of the real one.

    Args:
        trainer: the real one.
        package: its Lightning package.
    """

    callbacks: Sequence[Any] = ()

    def __init__(self, trainer: Any, package: str) -> None:
        self._real = trainer
        self._package = package
        self.logger = Silent()
        self.loggers = [self.logger]

    def begin(self, twin: nn.Module, device: torch.device) -> None:
        """Take the copy, and make a strategy and a precision plugin that are its own."""
        self.lightning_module = self.model = twin
        self.precision_plugin = compat.trial_precision(self._real.precision_plugin, device)
        self.strategy = TrialStrategy(self, self._package, device)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the copy."""
        return self.strategy.optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Those of the copy."""
        return self.strategy.lr_scheduler_configs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_real":
            raise AttributeError(name)
        return getattr(self._real, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrialTrainer:
        return self


class TrialStrategy:
    """Stands for the strategy in a trial: backward and optimizer steps of the copy, with the Trainer's precision.

    Args:
        trainer: the trial's stand-in.
        package: the Lightning package.
        device: the root device.
    """

    def __init__(self, trainer: TrialTrainer, package: str, device: torch.device) -> None:
        self._trainer = trainer
        self._package = package
        self.root_device = device
        self.optimizers: list[torch.optim.Optimizer] = []
        self._lightning_optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.glue: Glue
        self.mark: Mark
        self.early: EarlyGradients | None = None
        self._manual_step = 0

    @property
    def precision_plugin(self) -> Any:
        """That of the copy."""
        return self._trainer.precision_plugin

    @property
    def lightning_module(self) -> Any:
        """The copy."""
        return self._trainer.lightning_module

    def take_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> None:
        """Use these, wrapped as Lightning wraps them."""
        self.optimizers, self.lr_scheduler_configs = list(optimizers), list(schedulers)
        self._lightning_optimizers = [
            compat.lightning_optimizer(self._package, optimizer, self) for optimizer in optimizers
        ]

    def begin_manual_step(self, number: int) -> None:
        """In manual optimization the user's step calls backward and optimizers itself."""
        self._manual_step = number
        self.mark(f"step {number} forward")

    def backward(self, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Strategy.backward`."""
        if self._manual_step:
            self.mark(f"step {self._manual_step} backward")
        plugin, twin = self.precision_plugin, self.lightning_module
        with self.glue():
            loss = plugin.pre_backward(loss, twin)
            if self.early is None:
                plugin.backward(loss, twin, optimizer, *args, **kwargs)
            else:
                self.early.give_back()
                self.early = None
            result: torch.Tensor = plugin.post_backward(loss, twin)
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As `Strategy.optimizer_step`."""
        return self.precision_plugin.optimizer_step(
            optimizer, model=model or self.lightning_module, closure=closure, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._trainer._real.strategy, name)


class Silent:
    """Stands for a logger: answers anything, keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silent:
        return self
