"""Which plans can be run: schedules are planned before the room that runs them knows them."""

from __future__ import annotations

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.question import EXECUTABLE


def refuse_to_run(plan: Plan) -> None:
    """Refuse a plan that asks for more than can be run, before anything moves.

    Example:
        >>> refuse_to_run(autobalance.plan(profile, "4x80GiB", schedule="1f1b"))     # doctest: +SKIP

    Args:
        plan: any.

    Raises:
        ValueError: its schedule cannot be run yet.
    """
    if plan.schedule not in EXECUTABLE or plan.micro_batches > 1:
        parts = f"{plan.micro_batches} micro-batches" if plan.micro_batches > 1 else "1 micro-batch"
        raise ValueError(
            f"this plan runs {plan.schedule} with {parts}, which is planned but cannot be run yet; make it with "
            f"schedule={EXECUTABLE[0]!r}."
        )
