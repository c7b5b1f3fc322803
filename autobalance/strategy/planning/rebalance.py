"""Move a model from one plan to another between two steps: nothing is lost, and no device ever holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autobalance.blocks import find_blocks
from autobalance.execution.running import running_of
from autobalance.execution.savings.savings import homes_of
from autobalance.partitioning.plan import Plan
from autobalance.placement.place import place
from autobalance.strategy.optimizers import send_state_home
from autobalance.strategy.options import Options
from autobalance.strategy.placed import Placed
from autobalance.strategy.planning.replan import Learned, plan_anew

_HOST = torch.device("cpu")


def rebalance(
    trainer: Any,
    options: Options,
    devices: Sequence[torch.device],
    before: Placed,
    learned: Learned,
    batch: Sequence[Tensor],
    adopt: Callable[[Placed], None],
) -> None:
    """Plan again between two steps, and move the model: as before where no plan fits.

    Args:
        trainer: a Trainer between two steps.
        options: how to plan.
        devices: the Trainer's devices.
        before: how the model is placed.
        learned: what the run has shown.
        batch: tensors of the batch that comes next, where it is on its device already; they follow the root device.
        adopt: makes a plan that of the strategy, and places the model by it.

    Raises:
        InfeasiblePlanError: if no plan fits.
    """
    module, optimizers = trainer.lightning_module, trainer.optimizers

    def place_by(placed: Placed) -> None:
        adopt(placed)
        placed.keep_state_on_host(optimizers, devices)

    before.remove()
    try:
        planned = plan_anew(trainer, options, devices, learned, batch)
    except BaseException:
        place_by(before)  # as ever: what runs micro-batches belongs to the hooks that are new now
        raise
    move_to_plan(module, before.plan, planned.plan, devices, optimizers, partial(place_by, planned))
    send_batch(batch, devices[planned.plan.root])


def move_to_plan(
    module: nn.Module,
    before: Plan,
    after: Plan,
    devices: Sequence[torch.device],
    optimizers: Sequence[Optimizer],
    place_anew: Callable[[], None],
) -> None:
    """Bring what changes its device to the host, block by block, and from there to its new device.

    Devices are emptied before anything arrives, so that none holds more than under one of the two plans. Parameters
    keep their identity, and gradients and optimizer state go with them.

    Example:
        >>> move_to_plan(module, old, new, devices, trainer.optimizers, lambda: placed.place(devices))  # doctest: +SKIP

    Args:
        module: the model, its hooks taken off.
        before: where everything is.
        after: where everything is to be.
        devices: the torch device of each device of the plans.
        optimizers: those of the model; none while it is not trained.
        place_anew: places the model by the new plan, and hooks it.
    """
    _empty(module, before, after, devices)
    send_state_home(optimizers)
    place_anew()
    send_state_home(optimizers)


def _empty(module: nn.Module, before: Plan, after: Plan, devices: Sequence[torch.device]) -> None:
    """Bring to the host all that has another device under the new plan."""
    blocks = find_blocks(module).ordered(after.block_names)
    old, new = _homes(before, devices), _homes(after, devices)
    places = [_between(old.get(name), new[name]) for name in after.block_names]
    # What only one of the plans names is with the root device under the other.
    was, root = before.loose_map, devices[after.root]
    loose = {
        name: _between(devices[was.get(name, before.root)], devices[after.loose_map.get(name, after.root)])
        for name in (*was, *after.loose_map)
    }
    place(module, blocks, places, loose, _between(devices[before.root], root))


def _homes(plan: Plan, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Where the weights of each block are."""
    homes = homes_of(running_of(plan), [devices[index] for index in plan.assignment])
    return dict(zip(plan.block_names, homes, strict=True))


def _between(before: torch.device | None, after: torch.device) -> torch.device:
    return after if before == after else _HOST


def send_batch(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move the tensors of a batch in place: whoever holds them, such as Lightning's loop, finds them there.

    Args:
        tensors: of the batch; what is on the host stays there.
        device: the new root device.
    """
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.device != device and tensor.is_leaf:
            tensor.data = tensor.data.to(device)
