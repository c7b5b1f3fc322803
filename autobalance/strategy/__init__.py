"""The strategy: the only room that knows Lightning, and only the package that the user has imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autobalance.strategy.strategy import SelfBalanceStrategy as SelfBalanceStrategy
    from autobalance.strategy.watching.monitor import BalanceMonitor as BalanceMonitor

__all__ = ["BalanceMonitor", "SelfBalanceStrategy"]


def __getattr__(name: str) -> Any:
    if name == "SelfBalanceStrategy":
        # Another one as soon as another Lightning package is imported: every Trainer in this process accepts it.
        from autobalance.strategy.registration import current_strategy

        return current_strategy()
    if name == "BalanceMonitor":
        from autobalance.strategy.registration import current_monitor

        return current_monitor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
