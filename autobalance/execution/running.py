"""How a placed model runs: in how many micro-batches and which order, and what its blocks do to hold less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autobalance.execution.beside import Beside
from autobalance.execution.pipeline import Pipeline

if TYPE_CHECKING:
    from autobalance.partitioning.plan import Plan


@dataclass(frozen=True)
class Running:
    """What of a plan says how it runs.

    Example:
        >>> running_of(plan).micro_batches

    Attributes:
        schedule: one of `autobalance.schedules.launches.SCHEDULES`.
        micro_batches: parts that a batch is split into, or batches of one step.
        stage_of: stage of every block, in call order.
        devices: device index of every stage.
        saving: for each block `"keep"`, `"recompute"` or `"offload"`; empty where all keep.
        streamed: blocks whose weights are in host memory.
        host_optimizer: devices whose optimizer state is in host memory.
        accumulated: whether micro-batches are whole batches, of which a step adds up the gradients.
    """

    schedule: str = "naive"
    micro_batches: int = 1
    stage_of: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    saving: tuple[str, ...] = ()
    streamed: tuple[int, ...] = ()
    host_optimizer: tuple[int, ...] = ()
    accumulated: bool = False

    @property
    def is_split(self) -> bool:
        """Whether batches are split."""
        return self.micro_batches > 1

    def pipeline(self, beside: Sequence[Beside] = ()) -> Pipeline | None:
        """What runs its micro-batches; None where batches stay whole.

        Args:
            beside: told of all that happens, as for `Pipeline`.
        """
        return Pipeline(self.schedule, self.stage_of, self.devices, beside) if self.is_split else None


def running_of(plan: Plan) -> Running:
    """How a plan runs.

    Example:
        >>> running_of(plan).schedule
        '1f1b'

    Args:
        plan: any.
    """
    stage_of = [0] * len(plan.blocks)
    for number, stage in enumerate(plan.stages):
        for block in stage.blocks:
            stage_of[block] = number
    return Running(
        plan.schedule,
        plan.micro_batches,
        tuple(stage_of),
        tuple(stage.device for stage in plan.stages),
        plan.saving,
        plan.streamed,
        plan.host_optimizer,
        plan.accumulated,
    )
