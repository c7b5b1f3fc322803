"""Tell the user once what is where, as Lightning tells its model summary."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from autobalance.strategy.planning.data_parallel import faster_with_ddp
from autobalance.strategy.registration import lightning_root

if TYPE_CHECKING:
    from autobalance.partitioning.plan import Plan

_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def log_plan(plan: Plan, trainer: Any) -> None:
    """Log the plan's table, unless the Trainer is told not to summarise the model.

    Args:
        plan: the plan.
        trainer: the Trainer; `enable_model_summary=False` silences the table.
    """
    summary = import_module(f"{lightning_root(trainer)}.callbacks").ModelSummary
    if any(isinstance(callback, summary) for callback in trainer.callbacks):
        tell(trainer, f"\n{plan}")
        if advice := faster_with_ddp(plan):
            tell(trainer, advice)


def tell(trainer: Any, text: str) -> None:
    """Log what the user should know, as Lightning logs; each text once for a Trainer, however often it plans.

    Args:
        trainer: the Trainer, of either package.
        text: what to say.
    """
    said = _said.setdefault(trainer, set())
    if text in said:
        return
    said.add(text)
    import_module(f"{lightning_root(trainer)}.utilities.rank_zero").rank_zero_info(text)
