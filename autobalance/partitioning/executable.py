"""Which plans a module can run by itself, without the Trainer around it."""

from __future__ import annotations

from autobalance.partitioning.plan import Plan


def refuse_micro_batches(plan: Plan) -> None:
    """Refuse a plan that splits batches, where nothing but the module is called.

    Example:
        >>> refuse_micro_batches(autobalance.plan(profile, "4x80GiB", schedule="1f1b"))     # doctest: +SKIP

    Args:
        plan: any.

    Raises:
        ValueError: it has several micro-batches.
    """
    if plan.micro_batches > 1:
        raise ValueError(
            f"this plan runs {plan.schedule} with {plan.micro_batches} micro-batches, which need the step's loss and "
            f"its backward, and not just calls of the model: train with "
            f"Trainer(strategy=SelfBalanceStrategy(plan=...)), or make the plan with schedule='naive'."
        )
