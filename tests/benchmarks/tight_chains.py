"""Random chains whose budgets leave little room: does a plan keep everything on the devices where that is possible?

Run it by hand: `python tests/benchmarks/tight_chains.py` (accelerate beside it: `autobalance[benchmarks]`). A budget is
the least with which a split in call order exists, times a slack of 1 or more: there always is a plan. Costs are weights
alone, which is all that accelerate's device maps know of; `balanced` is asked of both.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import autobalance
from autobalance.errors import InfeasiblePlanError

SLACKS = (1.0, 1.1, 1.25, 1.5)
MIB = 2**20


def main() -> int:
    """Plan every chain, and say how often a planner left devices for the host, or went over a budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="chains for each slack (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the chains (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="without accelerate")
    options = parser.parse_args()
    # It warns that the devices of the question are not in this machine.
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
    table = Table("slack", "chains", "plans", "over a budget", "accelerate: offloads")
    kept = True
    for slack in SLACKS:
        rng = random.Random(options.seed)
        plans = over = offloads = 0
        for _ in range(options.count):
            devices = rng.randint(2, 4)
            sizes = [rng.randint(1, 16) * MIB for _ in range(rng.randint(4, 16))]
            budget = int(slack * _least_budget(sizes, devices))
            found = _plan(sizes, [budget] * devices)
            if found is not None:
                plans += 1
                held = [0] * devices
                for size, device in zip(sizes, found, strict=True):
                    held[device] += size
                over += max(held) > budget
            offloads += 0 if options.alone else _accelerate_offloads(sizes, [budget] * devices)
        kept &= plans == options.count and not over
        table.add_row(*map(str, (slack, options.count, plans, over)), "not asked" if options.alone else str(offloads))
    Console(width=100).print(table)
    print("a plan every time, none over a budget" if kept else "a plan is missing or over its budget")
    return 0 if kept else 1


def _least_budget(sizes: Sequence[int], devices: int) -> int:
    """Bytes with which consecutive blocks can be given to so many devices: the least of all sums that suffice."""
    sums = {sum(sizes[start:stop]) for start in range(len(sizes)) for stop in range(start + 1, len(sizes) + 1)}
    return min(budget for budget in sums if _needed(sizes, budget) <= devices)


def _needed(sizes: Sequence[int], budget: int) -> float:
    """Devices that are needed when each is filled before the next one is begun."""
    devices, held = 1, 0
    for size in sizes:
        if size > budget:
            return float("inf")
        held += size
        if held > budget:
            devices, held = devices + 1, size
    return devices


def _plan(sizes: Sequence[int], budgets: Sequence[int]) -> tuple[int, ...] | None:
    profile = autobalance.Profile.from_costs(sizes)
    try:
        return autobalance.plan(profile, budgets, policy="balanced", cache=False).assignment
    except InfeasiblePlanError:
        return None


def _accelerate_offloads(sizes: Sequence[int], budgets: Sequence[int]) -> bool:
    """Whether `device_map="balanced"` of the same sizes and budgets leaves a block to the host or the disk."""
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory
    except ImportError as error:
        raise SystemExit("accelerate is not installed: pip install 'autobalance[benchmarks]', or --alone") from error
    import torch

    class Block(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(size // 4, device="meta"))

    model = torch.nn.Sequential(*(Block(size) for size in sizes))
    limits: dict[int | str, int] = {**dict(enumerate(budgets)), "cpu": sum(sizes)}
    limits = get_balanced_memory(model, limits, no_split_module_classes=["Block"])
    places = infer_auto_device_map(model, limits, no_split_module_classes=["Block"])
    return not {"cpu", "disk"}.isdisjoint(places.values())


if __name__ == "__main__":
    sys.exit(main())
