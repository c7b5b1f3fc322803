"""Private names of Lightning; `package` is "pytorch_lightning" or "lightning.pytorch"."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn


def set_lightning_device(module: nn.Module, device: torch.device) -> None:
    """Make `LightningModule.device` of `module`, and of those inside it, say `device`; nothing is moved.

    Args:
        module: of either package of Lightning.
        device: what it is to say.
    """
    for part in module.modules():
        if any(base.__name__ == "_DeviceDtypeModuleMixin" for base in type(part).__mro__):
            vars(part)["_device"] = device


def detects_anomalies(trainer: Any) -> bool:
    """Whether a Trainer runs with autograd's anomaly detection.

    Args:
        trainer: a Trainer.
    """
    return bool(trainer._detect_anomaly)


def skips_backward(trainer: Any) -> bool:
    """Whether the running epoch only updates statistics, as weight averaging does for batch norm.

    Args:
        trainer: a Trainer inside `fit`.
    """
    return bool(trainer.fit_loop._skip_backward)


class TrainerChoice:
    """What a Trainer has chosen before it makes its strategy, and what may still be changed.

    Args:
        connector: the Trainer's accelerator connector.
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    @property
    def package(self) -> str:
        """The Trainer's Lightning package."""
        return str(type(self._connector).__module__.partition(".trainer.")[0])

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self._connector.accelerator

    @property
    def devices(self) -> list[torch.device]:
        """The devices to use."""
        return list(self._connector._parallel_devices)

    @property
    def strategy(self) -> Any:
        """A name in the strategy registry, or a strategy."""
        return self._connector._strategy_flag

    @property
    def precision(self) -> str:
        """The precision by name."""
        return str(self._connector._precision_flag)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin that the user gave, or None."""
        return self._connector._precision_plugin_flag

    def use_precision(self, plugin: Any) -> None:
        """Have the Trainer use `plugin`."""
        self._connector._precision_plugin_flag = plugin

    def use_root_device(self, device: torch.device) -> None:
        """Have a single-device strategy use `device`."""
        if hasattr(self.strategy, "_root_device"):
            self.strategy._root_device = device


def call_before_strategy_is_chosen(package: str, check: Callable[[TrainerChoice], None]) -> None:
    """Have `check(choice)` called whenever a Trainer of `package` has chosen its devices but not made its strategy.

    Lightning gives an accelerator no say in the choice of strategy and precision, and launches processes soon after.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        check: may change the choice or raise.
    """
    connector = import_module(f"{package}.trainer.connectors.accelerator_connector")._AcceleratorConnector
    make = connector._init_strategy
    if hasattr(make, "__wrapped__"):  # done already
        return

    @wraps(make)
    def checked(self: Any) -> None:
        check(TrainerChoice(self))
        make(self)

    connector._init_strategy = checked


def call_around_hooks(package: str, context: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> None:
    """Have the hooks that a LightningModule or a callback of `package` overrides run inside `context(trainer)`.

    Lightning gives a strategy no say around hooks. It is so for the rest of the process.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        context: asked for each hook; given again, it is not entered twice.
    """
    call: Any = import_module(f"{package}.trainer.call")
    if hasattr(call, "_wrapped_by_autobalance"):
        return
    plain_module = import_module(package).LightningModule
    plain_callback = import_module(f"{package}.callbacks").Callback
    call_module, call_callbacks = call._call_lightning_module_hook, call._call_callback_hooks

    @wraps(call_module)
    def module_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        module = kwargs.get("pl_module") or trainer.lightning_module
        if not _is_overridden(hook_name, module, plain_module):
            return call_module(trainer, hook_name, *args, **kwargs)
        with context(trainer):
            return call_module(trainer, hook_name, *args, **kwargs)

    @wraps(call_callbacks)
    def callback_hooks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        if not any(_is_overridden(hook_name, callback, plain_callback) for callback in trainer.callbacks):
            return
        with context(trainer):
            call_callbacks(trainer, hook_name, *args, **kwargs)

    call._call_lightning_module_hook, call._call_callback_hooks = module_hook, callback_hooks
    call._wrapped_by_autobalance = True


def _is_overridden(name: str, instance: Any, base: type) -> bool:
    method = getattr(instance, name, None)
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def configured_optimizers(package: str, module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and learning-rate schedulers that `module.configure_optimizers()` returns, in any form.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        module: a LightningModule.
    """
    optimizers, schedulers = import_module(f"{package}.core.optimizer")._init_optimizers_and_lr_schedulers(module)
    return list(optimizers), list(schedulers)


def lightning_optimizer(package: str, optimizer: Any, strategy: Any) -> Any:
    """The wrapper in which Lightning hands an optimizer to the user's step.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        optimizer: a torch optimizer.
        strategy: whose `optimizer_step` the wrapper calls.
    """
    return import_module(f"{package}.core.optimizer").LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def closure_classes(package: str) -> tuple[Any, Any]:
    """Lightning's closure of a step, and the class of its result, which keep the loss alive as in a real run.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".
    """
    automatic = import_module(f"{package}.loops.optimization.automatic")
    return automatic.Closure, automatic.ClosureResult


def trial_precision(plugin: Any, device: torch.device) -> Any:
    """A precision plugin that works like `plugin` on `device` and shares no state with it.

    Args:
        plugin: of the run.
        device: of the trial.
    """
    twin = copy.copy(plugin)
    if hasattr(twin, "autocast_context_manager"):
        twin.device = device.type
    if getattr(twin, "scaler", None) is not None:
        twin.scaler = stepping_scaler(device.type)
    return twin


def stepping_scaler(device_type: str) -> torch.amp.GradScaler:
    """A gradient scaler for a trial on devices of one type, which has no gradients to find infinite.

    Args:
        device_type: such as "cuda".
    """
    return _SteppingScaler(device_type)


class _SteppingScaler(torch.amp.GradScaler):
    """A gradient scaler that never skips a step: whether a gradient is infinite only real numbers tell."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


def result_collection(package: str, training: bool) -> Any:
    """The collection in which Lightning keeps what a step logs.

    Args:
        package: "pytorch_lightning" or "lightning.pytorch".
        training: whether the step is a training step.
    """
    return import_module(f"{package}.trainer.connectors.logger_connector.result")._ResultCollection(training)
