"""Whether the caching allocators of real devices can serve a plan: free memory in pieces is lost to larger tensors."""

from __future__ import annotations

from autobalance.allocator.caching import OutOfCapacity
from autobalance.allocator.replay import Requests, replay_requests
from autobalance.allocator.settings import settings_from_environment
from autobalance.devices.device import Device
from autobalance.partitioning.budgets import ALLOWANCE, FRAGMENTS
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.chains.solution import Solution
from autobalance.partitioning.judge import Judged, launched
from autobalance.profiling.profile import BY_HAND, Profile
from autobalance.schedules.launches import launch_order
from autobalance.timelines.meeting import as_met


def needs_of(problem: Problem, solution: Solution, judged: Judged) -> list[int]:
    """Bytes that every device needs: its peak, or more than it may use where its allocator would run out.

    Example:
        >>> needs_of(problem, solution, judged)

    Args:
        problem: whose budgets hold.
        solution: of it.
        judged: its replay.

    Returns:
        One number for each device. Where the allocator runs out, that is the budget and what is missing at that
        instant; only devices whose tensors would fit are asked.
    """
    needs, profile = list(judged.peaks), problem.profile
    rooms = [budget - known for budget, known in zip(problem.budgets, problem.excess, strict=True)]
    asked = [
        index
        for index, device in enumerate(problem.devices)
        if has_allocator(profile, device) and 0 < needs[index] <= rooms[index]
    ]
    # Where weights of blocks that stream lie, the storages of a trace do not tell.
    if not asked or solution.streamed:
        return needs
    places = [stage.device for stage in judged.stages]
    parts = problem.micro_batches
    order = launch_order(problem.schedule, len(places), parts, devices=places, training=profile.training)
    away = [block for block, place in enumerate(solution.assignment) if place in solution.host_optimizer]
    timeline = launched(profile, judged.stages, order, parts, solution.saving, on_host=away)
    met, homes = as_met(timeline, timeline.homes(solution.assignment, solution.root))
    requests = met.requests(homes, len(needs))
    for index in asked:
        most = most_reserved(problem.devices[index], problem.budgets[index]) - problem.excess[index]
        missing = _missing(requests[index], most)
        if missing:
            needs[index] = rooms[index] + missing
    return needs


def has_allocator(profile: Profile, device: Device) -> bool:
    """Whether a caching allocator will serve the storages that a profile tells of.

    Example:
        >>> has_allocator(profile, plan.devices[0])

    Args:
        profile: costs given by hand have no storages that an allocator would meet.
        device: those that are not there are held to their peaks alone.
    """
    return device.real and profile.granule > 1 and profile.target != BY_HAND


def most_reserved(device: Device, budget: int) -> int:
    """Bytes that the allocator of a device may take for tensors of so many bytes.

    Budgets keep a share of the memory for the pieces between tensors, which are the allocator's; what libraries and the
    context need is not.

    Example:
        >>> most_reserved(Device("cuda:0", 80 * 2**30, real=True), budget=77 * 2**30) / 2**30

    Args:
        device: that has the memory.
        budget: bytes that tensors on it may take.
    """
    with_pieces = int((budget + ALLOWANCE) / (1 - FRAGMENTS)) - ALLOWANCE
    return max(budget, min(device.capacity - ALLOWANCE, with_pieces))


def _missing(requests: Requests, most: int) -> int:
    """Bytes that are missing at the first birth that cannot be served."""
    try:
        replay_requests(requests, most, settings_from_environment())
    except OutOfCapacity as error:
        return max(1, error.reserved + error.wanted - error.capacity)
    return 0
