"""Train a model that does not fit on one GPU on several, with `strategy="self_balance"`.

Example:
    class Net(autobalance.SelfBalance, LightningModule):
        def self_balance(self):
            return [self.embed, *self.layers, self.head]

    Trainer(strategy="self_balance", devices=4).fit(Net(), loader)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autobalance.errors import InfeasiblePlanError
    from autobalance.execution.dispatch import dispatch
    from autobalance.mixin import SelfBalance
    from autobalance.partitioning.plan import Plan
    from autobalance.partitioning.score import score
    from autobalance.partitioning.search import plan
    from autobalance.placement.materialize import load_weights
    from autobalance.profiling.plain import profile
    from autobalance.profiling.profile import Profile
    from autobalance.simulated import simulate
    from autobalance.strategy import BalanceMonitor, SelfBalanceStrategy

__version__ = "0.1.0"

# Where each public name lives: found on first use, so that `import autobalance` imports neither torch nor Lightning.
_HOMES = {
    "BalanceMonitor": "autobalance.strategy",
    "InfeasiblePlanError": "autobalance.errors",
    "Plan": "autobalance.partitioning.plan",
    "Profile": "autobalance.profiling.profile",
    "SelfBalance": "autobalance.mixin",
    "SelfBalanceStrategy": "autobalance.strategy",
    "dispatch": "autobalance.execution.dispatch",
    "load_weights": "autobalance.placement.materialize",
    "plan": "autobalance.partitioning.search",
    "profile": "autobalance.profiling.plain",
    "score": "autobalance.partitioning.score",
    "simulate": "autobalance.simulated",
}

__all__ = [
    "BalanceMonitor",
    "InfeasiblePlanError",
    "Plan",
    "Profile",
    "SelfBalance",
    "SelfBalanceStrategy",
    "dispatch",
    "load_weights",
    "plan",
    "profile",
    "score",
    "simulate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


import_module("autobalance.strategy.registration_on_import").register_now_or_on_import()
