"""Why nothing fits, in figures, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.allocator_check import needs_of
from autobalance.partitioning.chains.policies import balanced
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.left_out import EXPANDABLE
from autobalance.units import format_size

# The count of devices that would do is searched over subsets of items; a model with more has other worries.
_MOST_ITEMS = 3
# Pins may ask for more devices than the sizes do: so many counts are tried.
_TRIES = 4


def infeasible(problem: Problem, remedies: Iterable[str] = ()) -> InfeasiblePlanError:
    """The error that says what is missing where, for a problem without a solution.

    Example:
        >>> raise infeasible(problem)

    Args:
        problem: which has no solution.
        remedies: options that would help, in words.
    """
    best = problem.solve(balanced, hard=False)
    assert best is not None, "without budgets every chain can be cut"
    needs = needs_of(problem, best, problem.judge(best))
    need = tuple(peak + (extra if peak else 0) for peak, extra in zip(needs, problem.excess, strict=True))
    name, size = _largest(problem)

    def told() -> str:
        advice = [*remedies, *_advice(problem, need, name, size)]
        return "\n".join([*_shortage(problem, need, name, size), *(f"  - {line}" for line in advice)])

    return InfeasiblePlanError(told, need=need, budget=problem.budgets, largest_block=name)


def _shortage(problem: Problem, need: Sequence[int], name: str, size: int) -> list[str]:
    """What is missing where."""
    found = (
        "no plan was found that CUDA's caching allocators can serve: free memory lies in pieces that are too small."
        if problem.ran_out
        else "no plan was found that fits the devices and the host's memory."
        if problem.is_short_of_host
        else "no plan was found that fits the devices; groups that must share a device are too many to try all places."
        if not problem.is_exact
        else "no plan was found that fits the devices; where gradients of one tensor meet, only some plans were tried."
        if problem.known
        else "no plan was found that fits the devices; blocks that must share a device, or are pinned, are taken to "
        "keep what they save, and to hold as many micro-batches as one stage does."
        if _is_simplified(problem)
        else "no plan fits the devices."
    )
    lines = [f"{found} The best plan that ignores their budgets is short of memory:"]
    for index, (device, wanted, given) in enumerate(zip(problem.devices, need, problem.budgets, strict=True)):
        missing = f"{format_size(wanted - given)} missing" if wanted > given else "enough"
        lines.append(f"  {label(index, device)}: needs {format_size(wanted)}, may use {format_size(given)}, {missing}")
    lines.append(f"The largest block is {name!r}: {format_size(size)} by itself.")
    static, budget = sum(block.static for block in problem.profile.blocks), sum(problem.budgets)
    if static > budget:
        lines.append(
            f"No batch is small enough: what stays (weights, gradients, optimizer state, buffers) takes "
            f"{format_size(static)}, all budgets together are {format_size(budget)}."
        )
    return [*lines, "What would help:"]


def _is_simplified(problem: Problem) -> bool:
    """Whether blocks are placed as one or beside the chain in a question of which the search then knows less."""
    is_beside = any(owner >= 0 for item in problem.chain.items for owner in item.owners)
    is_grouped = any(sum(owner >= 0 for owner in owners) > 1 for owners in problem.chain.units)
    return (problem.allowed is not None and (is_beside or is_grouped)) or (problem.micro_batches > 1 and is_beside)


def label(index: int, device: Device) -> str:
    """How a device is called in words: its position, and its name where that says more.

    Example:
        >>> label(1, Device("A100-80GB", 1))
        'device 1 (A100-80GB)'

    Args:
        index: its position.
        device: itself.
    """
    position = f"device {index}"
    return position if device.name == position else f"{position} ({device.name})"


def _largest(problem: Problem) -> tuple[str, int]:
    alone = problem.unit_peaks()
    found = [(int(alone[unit]), members) for unit, members in enumerate(problem.chain.units)]
    found += [(problem.item_peak(index), item.owners) for index, item in enumerate(problem.chain.items)]
    size, owners = max((peak, owners) for peak, owners in found if any(owner >= 0 for owner in owners))
    return " with ".join(problem.profile.names[owner] for owner in owners if owner >= 0), size


def _advice(problem: Problem, need: Sequence[int], name: str, size: int) -> Iterator[str]:
    blocks = problem.profile.blocks
    static, saved = sum(block.static for block in blocks), sum(block.saved for block in blocks)
    trained = sum(block.gradients + block.optimizer for block in blocks)
    budget, most = sum(problem.budgets), max(problem.budgets)
    size += max(problem.excess)
    if problem.ran_out:
        yield f"{EXPANDABLE} in the environment, which joins free memory"
    if saved and static <= budget:
        share = saved / max(1, static + saved)
        yield (
            f"a smaller batch: {format_size(saved)} ({share:.0%}) are tensors saved for backward, which shrink with it"
        )
    if size > most:
        yield (
            f"splitting {name!r} into several blocks: by itself it needs {format_size(size)}, and no device may use "
            f"more than {format_size(most)}, so that more devices alone do not help"
        )
    elif not problem.ran_out:  # else more devices or larger ones may not do where their bytes are enough
        present = len(problem.budgets)
        count = devices_needed(problem, most - max(problem.excess))
        if count is not None and count <= present:
            yield (
                f"other pins or larger budgets: {count} of these {present} devices would do if each could use "
                f"{format_size(most)} and blocks could lie anywhere"
            )
        elif count is not None and (enough := _first_enough(problem, count, most)) is not None:
            yield f"more devices: {enough} that may use {format_size(most)} each would do"
    may_recompute = problem.allowed is not None and problem.allowed.recompute
    if saved and not may_recompute:
        yield f"recompute (activation checkpointing inside the blocks): up to {format_size(saved)} need not be saved"
    if trained:
        yield (
            f"freezing half of the blocks (requires_grad=False): about {format_size(trained / 2)} of gradients and "
            "optimizer state less"
        )
    missing = sum(max(0, wanted - given) for wanted, given in zip(need, problem.budgets, strict=True))
    yield f"budgets that are {format_size(missing)} larger in total, where max_memory or reserve hold them down"


def _first_enough(problem: Problem, least: int, budget: int) -> int | None:
    """The first count of equal devices, from `least` on, on which the problem has a solution with its pins."""
    for count in range(least, least + _TRIES):
        if problem.on_equal_devices(count, budget).solve(balanced) is not None:
            return count
    return None


def devices_needed(problem: Problem, budget: int) -> int | None:
    """Fewest equal devices that the model fits on, with items free to go anywhere.

    Example:
        >>> devices_needed(problem, budget=80 * 2**30)

    Args:
        problem: whose chain and items are to lie somewhere.
        budget: bytes of each device.

    Returns:
        None where no number of devices is enough, or where more than three items make the count too long.
    """
    items, units = len(problem.chain.items), len(problem.chain.units)
    if items > _MOST_ITEMS:
        return None
    subsets = [frozenset(i for i in range(items) if code >> i & 1) for code in range(2**items)]
    # fewest[code][k]: devices for the units from k on together with the items in `code`.
    fewest = np.full((len(subsets), units + 1), np.inf)
    fewest[0, units] = 0
    for code, wanted in enumerate(subsets):
        for start in range(units, -1, -1):
            for part, here in enumerate(subsets):
                if not here <= wanted:
                    continue
                # A stage without units and without items would not get any further.
                first = start if here else start + 1
                fits = problem.peaks(here)[start, first:] <= budget
                rest = fewest[code & ~part, first:][fits]
                if rest.size:
                    fewest[code, start] = min(fewest[code, start], 1 + rest.min())
    count = fewest[-1, 0]
    return int(count) if np.isfinite(count) else None
