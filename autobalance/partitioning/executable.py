"""Which plans can be run: schedules and savings are planned before the room that runs them knows them."""

from __future__ import annotations

from collections.abc import Iterator

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.question import EXECUTABLE, RECOMPUTES


def refuse_to_run(plan: Plan) -> None:
    """Refuse a plan that asks for more than can be run, before anything moves.

    Example:
        >>> refuse_to_run(autobalance.plan(profile, "4x80GiB", schedule="1f1b"))     # doctest: +SKIP

    Args:
        plan: any.

    Raises:
        ValueError: its schedule, or the way in which blocks save memory, cannot be run yet.
    """
    asked = tuple(_beyond(plan))
    if asked:
        runs, options = (" and ".join(part) for part in zip(*asked, strict=True))
        raise ValueError(f"this plan {runs}, which is planned but cannot be run yet; make it with {options}.")


def _beyond(plan: Plan) -> Iterator[tuple[str, str]]:
    """What the plan does that cannot be run, and the option that keeps a plan from it."""
    if plan.schedule not in EXECUTABLE or plan.micro_batches > 1:
        parts = f"{plan.micro_batches} micro-batches" if plan.micro_batches > 1 else "1 micro-batch"
        yield f"runs {plan.schedule} with {parts}", f"schedule={EXECUTABLE[0]!r}"
    recomputed = [block for block, saving in zip(plan.block_names, plan.saving, strict=False) if saving == "recompute"]
    if recomputed and not RECOMPUTES:
        yield f"recomputes {_blocks(recomputed)}", "recompute=False"
    offloaded = [block for block, saving in zip(plan.block_names, plan.saving, strict=False) if saving == "offload"]
    on_host = [f"what {_blocks(offloaded)} {'saves' if len(offloaded) == 1 else 'save'}"] if offloaded else []
    on_host += [f"weights of {_blocks([plan.block_names[block] for block in plan.streamed])}"] if plan.streamed else []
    on_host += [f"optimizer state of device {', '.join(map(str, plan.host_optimizer))}"] if plan.host_optimizer else []
    if on_host:
        yield f"keeps {', '.join(on_host)} on the host", "offload=False"


def _blocks(names: list[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{len(names)} blocks"
