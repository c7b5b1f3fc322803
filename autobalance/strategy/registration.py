"""Make the strategy and the simulated accelerator known to each Lightning package, by classes built on its own bases.

`pytorch_lightning` and `lightning.pytorch` have separate classes and registries, and either Trainer refuses the other's
strategies. Both may be loaded in one process.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

ROOTS = ("pytorch_lightning", "lightning.pytorch")
STRATEGY_NAME = "self_balance"
ACCELERATOR_NAME = "simulated"


def imported_roots() -> tuple[str, ...]:
    """The Lightning packages that this process has imported."""
    return tuple(root for root in ROOTS if root in sys.modules)


def register_imported() -> None:
    """Register with every Lightning package that this process has imported.

    Example:
        >>> register_imported()
        >>> Trainer(strategy="self_balance", devices=4)  # doctest: +SKIP
    """
    for root in imported_roots():
        register(root)


def register(root: str) -> None:
    """Register the strategy and the accelerator with one Lightning package; again is harmless.

    Args:
        root: "pytorch_lightning" or "lightning.pytorch".
    """
    from autobalance.compat import warn_if_torch_is_untested

    strategies = import_module(f"{root}.strategies").StrategyRegistry
    accelerators = import_module(f"{root}.accelerators").AcceleratorRegistry
    if STRATEGY_NAME not in strategies:
        strategies.register(STRATEGY_NAME, strategy_class((root,)), description="blocks spread over several devices")
    if ACCELERATOR_NAME not in accelerators:
        accelerators.register(ACCELERATOR_NAME, accelerator_class(root), description="devices that are not there")
    warn_if_torch_is_untested()


def current_strategy() -> type[Any]:
    """`SelfBalanceStrategy` for the Lightning packages imported so far; if none, for `pytorch_lightning`."""
    roots = imported_roots() or ROOTS[:1]
    for root in roots:
        register(root)
    return strategy_class(roots)


@lru_cache
def strategy_class(roots: tuple[str, ...]) -> type[Any]:
    """The strategy built on the base classes of `roots`; with several, each instance uses those of its Trainer.

    Args:
        roots: names of Lightning packages, each imported.
    """
    from autobalance.strategy.strategy import SelfBalanceStrategy

    bases = tuple(import_module(f"{root}.strategies").ParallelStrategy for root in roots)
    chooser = (_chooser(roots, bases),) if len(roots) > 1 else ()
    cls = _build(SelfBalanceStrategy, (*chooser, *bases), roots[0])
    for root in roots if len(roots) > 1 else ():
        cls.register(strategy_class((root,)))  # isinstance(trainer.strategy, autobalance.SelfBalanceStrategy)
    return cls


def current_monitor() -> type[Any]:
    """`BalanceMonitor` for the Lightning packages imported so far; if none, for `pytorch_lightning`."""
    return monitor_class(imported_roots() or ROOTS[:1])


@lru_cache
def monitor_class(roots: tuple[str, ...]) -> type[Any]:
    """The monitor built on the base classes of `roots`, which is a callback to the Trainers of each.

    Args:
        roots: names of Lightning packages, each imported.
    """
    from autobalance.strategy.watching.monitor import BalanceMonitor

    return _build(BalanceMonitor, tuple(import_module(f"{root}.callbacks").Callback for root in roots), roots[0])


@lru_cache
def accelerator_class(root: str) -> type[Any]:
    """The simulated accelerator built on the base class of one Lightning package.

    Args:
        root: name of the package.
    """
    from autobalance.strategy.accelerator import SimulatedAccelerator

    return _build(SimulatedAccelerator, (import_module(f"{root}.accelerators").Accelerator,), root)


def lightning_root(value: object) -> str | None:
    """The Lightning package that the class of `value` comes from; None if it comes from neither.

    Args:
        value: any object.
    """
    for base in type(value).__mro__:
        for root in ROOTS:
            if base.__module__ == root or base.__module__.startswith(f"{root}."):
                return root
    return None


def overrides(module: Any, hook: str) -> bool:
    """Whether a LightningModule has a method `hook` of its own.

    Args:
        module: the LightningModule.
        hook: name of the method.
    """
    package = lightning_root(module)
    return bool(import_module(f"{package}.utilities.model_helpers").is_overridden(hook, module))


def _build(logic: type[Any], bases: tuple[type[Any], ...], root: str) -> type[Any]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(__module__=__name__.rpartition(".")[0], __doc__=logic.__doc__, lightning_package=root)

    return types.new_class(logic.__name__, (logic, *bases), exec_body=fill)


def _chooser(roots: tuple[str, ...], bases: tuple[type[Any], ...]) -> type[Any]:
    """A class that stands before the bases of several packages and hands each call to those of the instance's own."""
    by_root = dict(zip(roots, bases, strict=True))

    def choose(name: str) -> Any:
        def own(self: Any) -> Any:
            return getattr(by_root[self.lightning_package], name)

        if any(isinstance(getattr(base, name, None), property) for base in bases):
            return property(
                lambda self: own(self).__get__(self),
                lambda self, value: own(self).__set__(self, value),
            )
        call: Callable[..., Any] = lambda self, *args, **kwargs: own(self)(self, *args, **kwargs)
        return call

    members = [member for base in bases for cls in base.__mro__[:-1] for member in vars(cls).items()]
    names = {name for name, value in members if isinstance(value, (types.FunctionType, property))}
    return type("_ChoosesLightning", (), {name: choose(name) for name in names if not name.startswith("__")})
