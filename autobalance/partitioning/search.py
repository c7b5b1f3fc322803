"""`plan`: from a profile and devices to the best plan of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.bounds import area_bound, indivisible_bound
from autobalance.partitioning.budgets import budgets_of
from autobalance.partitioning.chain import build_chain, resolve_pins
from autobalance.partitioning.infeasible import infeasible
from autobalance.partitioning.minmax import Key
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.policies import POLICIES, balanced, policy_name
from autobalance.partitioning.problem import Problem, Solution
from autobalance.partitioning.replay import replay
from autobalance.partitioning.times import naive_step_time
from autobalance.profiling.profile import Profile
from autobalance.profiling.required import require_profile
from autobalance.units import parse_size

# Plans that a process remembers. A fit asks again for the plan that a trial made.
_REMEMBERED = 8
# A pinned block out of call order costs transfers; it has to lower what the policy minimises by more than this share.
_PRICE_OF_DISORDER = 0.05
# Plans that are tried where each takes more than its stages by themselves told.
_TRIES = 8


def plan(
    profile: Profile,
    devices: str | Sequence[int | float | str | Device] | None = None,
    *,
    policy: str = "auto",
    micro_batches: int | str = "auto",
    schedule: str = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
    reserve: str | float = "auto",
    pin: Mapping[str, int] | None = None,
    recompute: bool | str = "auto",
    offload: bool = False,
    cache: bool = True,
    excess: Sequence[int] | None = None,
) -> Plan:
    """The best split of a model over devices.

    Blocks stay in call order: each device holds consecutive ones, devices in the given order. Beside that order stand
    only groups that must share a device but are not consecutive (tied weights, a module used twice), which are tried on
    every device, and pinned blocks, where leaving the order lets a plan fit or betters it by more than 5 %.

    Example:
        >>> plan = autobalance.plan(profile, "4x80GiB")
        >>> plan.assignment, plan.peaks, plan.optimal

    Args:
        profile: what the blocks cost.
        devices: words (`"8x80GiB"`), a list of bytes, a list of `Device`; None: the GPUs of this machine.
        policy: `"balanced"`: the largest peak / budget is as small as can be, then all devices are used, then the
            next-largest is as small as can be, and so on. `"balanced_low_0"` (or `"minimize_first_gpu_memory"`): device
            0 keeps the batch and the loss and as few blocks as the others allow; they are balanced. `"sequential"`:
            filled in order, as few devices as possible. `"auto"`: `"balanced"`.
        micro_batches: `"auto"` or 1.
        schedule: `"auto"` or `"naive"`.
        max_memory: position in `devices` -> most it may hold, as accelerate has it.
        reserve: kept back from each device: bytes, a size in words, a fraction; `"auto"`: an allowance on real devices.
        pin: name of a block, or of something outside the blocks -> position in `devices`.
        recompute: `"auto"` or False.
        offload: False.
        cache: remember the plan in this process and give it again for the same question.
        excess: bytes by which each device is known to stand above the replay (an earlier plan's installed trace less
            its peaks); budgets then hold with them on top. Negative ones count as 0.

    Returns:
        The plan; its peaks are those of the replay. `optimal` is True where every plan of this kind was ruled out by
        proof; it is False only where several groups were too many to try all their devices, or where gradients of one
        tensor that went to several blocks meet at the peak of a device: then other plans are known by lower bounds.

    Raises:
        InfeasiblePlanError: budgets leave no way.
        ValueError: an argument that does not exist, or a pin that cannot be honoured.
        TypeError: an argument of another type, such as a model in place of its profile.
    """
    require_profile(profile, "plan")
    _refuse_what_does_not_exist(micro_batches, schedule, recompute, offload)
    targets = parse_devices(devices)
    if excess is not None and len(excess) != len(targets):
        raise ValueError(f"excess has {len(excess)} entries for {len(targets)} devices")
    above = tuple(max(0, parse_size(max(0, extra))) for extra in excess) if excess is not None else (0,) * len(targets)
    search = _search if cache else _search.__wrapped__
    return search(
        profile,
        targets,
        budgets_of(targets, max_memory, reserve),
        policy_name(policy),
        tuple(sorted(resolve_pins(profile, pin, len(targets)).items())),
        above,
    )


@lru_cache(maxsize=_REMEMBERED)
def _search(
    profile: Profile,
    devices: tuple[Device, ...],
    budgets: tuple[int, ...],
    policy: str,
    pins: tuple[tuple[int, int], ...],
    excess: tuple[int, ...],
) -> Plan:
    above = (0,) * len(devices)
    for _ in range(_TRIES):
        extra = tuple(known + more for known, more in zip(excess, above, strict=True))
        problem, solution = _best(profile, budgets, policy, pins, extra)
        if solution is None:
            break
        peaks = replay(profile.timeline, solution.assignment, solution.root, len(devices))
        # Where gradients of one tensor meet depends on all stages: what one takes is known only now.
        bounds = problem.bounds(solution.assignment, solution.root)
        proved = solution.proved and peaks == bounds and not any(above)
        if all(peak + known <= budget for peak, known, budget in zip(peaks, excess, budgets, strict=True) if peak):
            return _as_plan(profile, devices, policy, problem, solution, peaks, optimal=proved)
        above = tuple(max(most, peak - bound) for most, peak, bound in zip(above, peaks, bounds, strict=True))
    raise infeasible(profile, problem, devices, is_proved=problem.is_exact and not any(above))


def _best(
    profile: Profile,
    budgets: tuple[int, ...],
    policy: str,
    pins: tuple[tuple[int, int], ...],
    excess: tuple[int, ...],
) -> tuple[Problem, Solution | None]:
    """The best solution with its problem; the last problem where there is none."""
    root = 0 if policy == "balanced_low_0" else None
    best: tuple[Problem, Solution] | None = None
    for free_pins in (False, True) if pins else (False,):
        chain = build_chain(profile, dict(pins), root, free_pins=free_pins)
        problem = Problem(profile.timeline, chain, budgets, excess)
        solution = problem.solve(POLICIES[policy])
        if solution is not None and (best is None or _clearly_less(solution.key, best[1].key)):
            best = (problem, solution)
    return best or (problem, None)


def _clearly_less(key: Key, other: Key) -> bool:
    """Whether the first entries that differ by more than the price of leaving the call order differ downwards."""
    for mine, theirs in zip(key, other, strict=True):
        if abs(mine - theirs) > _PRICE_OF_DISORDER * abs(theirs):
            return mine < theirs
    return False


def _as_plan(
    profile: Profile,
    devices: tuple[Device, ...],
    policy: str,
    problem: Problem,
    solution: Solution,
    peaks: Sequence[int],
    *,
    optimal: bool,
) -> Plan:
    budgets = problem.budgets
    best: Solution | None = solution
    if policy != "balanced" or any(problem.excess):
        best = problem.with_budgets(budgets, (0,) * len(budgets)).solve(balanced)
        assert best is not None or not solution.proved, "a solution under one policy is a solution under all"
    area = area_bound(profile, budgets)
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)), "budgets are hard"
    return Plan(
        assignment=solution.assignment,
        blocks=profile.blocks,
        devices=devices,
        budgets=budgets,
        peaks=tuple(peaks),
        root=solution.root,
        policy=policy,
        loose=profile.loose,
        step_time=naive_step_time(profile, solution.assignment, solution.root, devices),
        bounds={
            "area": area,
            "indivisible block": max(area, indivisible_bound(problem)),
            # Without the proof, the best that was found bounds nothing.
            **({"optimum": best.key[0]} if best is not None and best.proved else {}),
        },
        optimal=optimal,
        batch=profile.batch,
        notes=profile.notes,
    )


def _refuse_what_does_not_exist(micro_batches: int | str, schedule: str, recompute: bool | str, offload: bool) -> None:
    if micro_batches not in ("auto", 1) or isinstance(micro_batches, bool):
        raise ValueError(f"micro_batches={micro_batches!r} does not exist; choose 'auto' or 1")
    if schedule not in ("auto", "naive"):
        raise ValueError(f"schedule={schedule!r} does not exist; choose 'auto' or 'naive'")
    if recompute not in ("auto", False):
        raise ValueError(
            f"recompute={recompute!r} does not exist; choose 'auto' or False, and use torch.utils.checkpoint inside "
            "the blocks"
        )
    if offload is not False:
        raise ValueError(f"offload={offload!r} does not exist; choose False")
