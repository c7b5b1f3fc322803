"""Tell the user once what is where, as Lightning tells its model summary."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autobalance.strategy.registration import lightning_root

if TYPE_CHECKING:
    from autobalance.partitioning.plan import Plan


def log_plan(plan: Plan, trainer: Any) -> None:
    """Log the plan's table, unless the Trainer is told not to summarise the model.

    Args:
        plan: the plan.
        trainer: the Trainer; `enable_model_summary=False` silences the table.
    """
    package = lightning_root(trainer)
    summary = import_module(f"{package}.callbacks").ModelSummary
    if any(isinstance(callback, summary) for callback in trainer.callbacks):
        import_module(f"{package}.utilities.rank_zero").rank_zero_info(f"\n{plan}")
