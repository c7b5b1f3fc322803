"""`plan`: from a profile and devices to the best plan of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.bounds import advice_on_time, advice_on_use, loop_bounds, time_bounds, use_bounds
from autobalance.partitioning.budgets import budgets_of, host_budget, without_host
from autobalance.partitioning.candidate import Candidate, best_candidate
from autobalance.partitioning.chains.chain import resolve_pins
from autobalance.partitioning.chains.policies import NEARLY, balanced, policy_name
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.infeasible import infeasible
from autobalance.partitioning.left_out import note_on_empty_devices, note_on_host, note_on_pieces
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.question import Question, counts_in, schedules_in
from autobalance.partitioning.remedies import remedies
from autobalance.partitioning.worth_splitting import advice_on_splitting
from autobalance.profiling.profile import Profile
from autobalance.profiling.required import require_profile
from autobalance.units import parse_size

# Plans that a process remembers. A fit asks again for the plan that a trial made.
_REMEMBERED = 8
# Bytes that no step takes on one device.
_ROOMY = 2**60


def plan(
    profile: Profile,
    devices: str | Sequence[int | float | str | Device] | None = None,
    *,
    policy: str = "auto",
    micro_batches: int | str | Sequence[int] = "auto",
    schedule: str | Sequence[str] = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
    reserve: str | float = "auto",
    pin: Mapping[str, int] | None = None,
    recompute: bool | str = "auto",
    offload: bool = False,
    cache: bool = True,
    excess: Sequence[int] | None = None,
    accumulated: bool = False,
) -> Plan:
    """The best split of a model over devices.

    Blocks stay in call order: each device holds consecutive ones; any order and any subset of the devices is tried.
    Beside that order stand only groups that must share a device but are not consecutive (tied weights, a module used
    twice), which are tried on every device, and pinned blocks, where leaving the order lets a plan fit or betters it by
    more than 5 %. Under `"looped"` a chain goes over the devices several times; under any schedule, chains that are
    independent of one another (policy and reference, teacher and student) begin at the first device each, where that
    betters a plan.

    Example:
        >>> plan = autobalance.plan(profile, "4x80GiB")
        >>> plan.assignment, plan.peaks, plan.optimal

    Args:
        profile: what the blocks cost.
        devices: words (`"8x80GiB"`), a list of bytes, a list of `Device`; None: the GPUs of this machine.
        policy: `"auto"`: the least predicted step time; of all plans within 2 % of it, the one with the smallest
            largest peak / budget. `"balanced"`: the largest peak / budget is as small as can be, then the sum of their
            squares. `"balanced_low_0"` (or `"minimize_first_gpu_memory"`): device 0 keeps the batch and the loss, which
            otherwise are on the device of the last block, and as few blocks as the others allow; they are balanced.
            `"sequential"`: filled in order, as few devices as possible.
        micro_batches: parts that a batch is split into: a number, several to choose among, or `"auto"`: up to eight
            for each device, and more where nothing else fits.
        schedule: `"naive"`, `"gpipe"`, `"1f1b"`, `"looped"`, several to choose among, or `"auto"`: all of them; under a
            policy that knows no time the naive one, and others where that does not fit.
        max_memory: position in `devices` -> most it may hold, as accelerate has it.
        reserve: kept back from each device: bytes, a size in words, a fraction; `"auto"`: an allowance on real devices.
        pin: name of a block, or of something outside the blocks -> position in `devices`.
        recompute: whether blocks may run their forward again in the backward in place of keeping what it saves, where
            that is needed to fit or makes the step shorter; `"auto"`: they may.
        offload: whether what blocks save may go to host memory until their backward, weights may stay there and stream
            to the device when they are needed, and the optimizer's state may stay there, where that is needed to fit or
            makes the step shorter. `max_memory["cpu"]` limits it for all devices together; else all that is free may be
            taken.
        cache: remember the plan in this process and give it again for the same question.
        excess: bytes by which each device is known to stand above the replay (an earlier plan's installed trace less
            its peaks); budgets then hold with them on top. Negative ones count as 0.
        accumulated: whether micro-batches are whole batches, of which one step adds up the gradients, in place of parts
            of one: `micro_batches` then says how many, and the step time is that of all of them.

    Returns:
        The plan; its peaks are those of the replay in launch order. `optimal` is True where every plan of this kind was
        ruled out by proof.

    Raises:
        InfeasiblePlanError: budgets leave no way, or the caching allocators of real devices run out.
        ValueError: an argument that does not exist, or a pin that cannot be honoured.
        TypeError: an argument of another type, such as a model in place of its profile.
    """
    require_profile(profile, "plan")
    targets = parse_devices(devices)
    if excess is not None and len(excess) != len(targets):
        raise ValueError(f"excess has {len(excess)} entries for {len(targets)} devices")
    schedules = schedules_in(schedule)
    if accumulated and micro_batches == "auto":
        raise ValueError("accumulated=True needs to know how many batches a step adds up: say micro_batches=")
    may_offload = _may("offload", offload)
    question = Question(
        profile,
        targets,
        budgets_of(targets, without_host(max_memory) if may_offload else max_memory, reserve),
        policy_name(policy),
        tuple(sorted(resolve_pins(profile, pin, len(targets)).items())),
        tuple(map(_excess, excess)) if excess is not None else (0,) * len(targets),
        schedules,
        counts_in(micro_batches, schedules, 0 if accumulated else profile.batch_size),
        _may("recompute", recompute),
        bool(may_offload),
        host_budget(max_memory) if may_offload else 0,
        accumulated=accumulated,
    )
    return (_search if cache else _search.__wrapped__)(question)


@lru_cache(maxsize=_REMEMBERED)
def _search(question: Question) -> Plan:
    found, hopeless = list[Candidate](), list[Problem]()
    for asked, splits in question.rounds:
        for schedule, count in splits:
            problem, candidate = _candidate(asked, schedule, count)
            if candidate is None:
                hopeless.append(problem)
            else:
                found.append(candidate)
        if found:
            break
    if not found:
        freest = next(problem for problem in hopeless if problem.allowed == question.allowed)
        raise infeasible(freest, remedies(question))
    return _as_plan(question, _best_of(asked, found))


def _candidate(
    question: Question, schedule: str, count: int, limit: float | None = None
) -> tuple[Problem, Candidate | None]:
    """The best partition for one way to split the batch, as `best_candidate` finds it.

    Blocks that may recompute do so where nothing fits else, or where a step without limits of memory would be shorter.
    """
    keeping = question.without_recomputing
    problem, kept = best_candidate(keeping, schedule, count, limit)
    if keeping.allowed == question.allowed or (kept is not None and not question.is_timed):
        return problem, kept
    if kept is not None:
        roomy = replace(keeping, budgets=(_ROOMY,) * len(question.budgets))
        _, unlimited = best_candidate(roomy, schedule, count)
        if unlimited is not None and kept.judged.seconds <= (1 + NEARLY) * unlimited.judged.seconds:
            return problem, kept
    saving = best_candidate(question, schedule, count, limit)
    _, found = saving
    is_better = kept is not None and (found is None or kept.key <= found.key)
    return (problem, kept) if is_better else saving


def _best_of(question: Question, found: Sequence[Candidate]) -> Candidate:
    """The best of several ways to split the batch.

    By step time, that is of all that take nearly the least the one with the smallest largest use, or which copies least
    to and from the host where all have to save memory.
    """
    least = min(found, key=lambda candidate: (candidate.key, candidate.judged.moved))
    if question.policy != "auto" or len(found) == 1:
        return least
    limit = least.key[0] * (1 + NEARLY)
    near = [candidate.problem for candidate in found if candidate.key[0] <= limit]
    if len(near) == 1 and least.proved and not least.is_loop:
        return least  # was searched within that limit
    again = [_candidate(question, problem.schedule, problem.micro_batches, limit)[1] for problem in near]
    lightest = [candidate for candidate in again if candidate is not None]
    return min(
        lightest,
        key=lambda candidate: (candidate.key[1], candidate.judged.moved, candidate.judged.seconds),
        default=least,
    )


def _as_plan(question: Question, found: Candidate) -> Plan:
    problem, solution, judged = found.problem, found.solution, found.judged
    # Without times nothing but memory was compared.
    is_timed = question.policy == "auto" and judged.seconds > 0
    may_loop = found.is_loop or problem.schedule == "looped"
    if is_timed:
        bounds = loop_bounds(problem) if may_loop else time_bounds(problem, within=judged.seconds)
    else:
        bounds = use_bounds(problem)
    least = found.least if is_timed or may_loop or question.policy == "balanced" else _least_use(problem)
    uses = [peak / max(1, budget) for peak, budget in zip(judged.peaks, question.budgets, strict=True)]
    value = judged.seconds + judged.once if is_timed else max(uses)
    # Of several micro-batches the tables may say more than is held, and what lies above a plan bounds none.
    if least is not None and (found.proved or least <= value):
        bounds["memory" if solution.proved else "relaxation"] = max(least, *bounds.values())
    if solution.saves_on and not is_timed:
        # These are bounds of devices that hold all; one that saves memory counts as full, and may hold less than that.
        bounds = {}
    advice: tuple[str, ...] = ()
    # In a loop no single block decides how long a step takes: what lies behind it runs meanwhile.
    if bounds and not (is_timed and may_loop):
        advice = (advice_on_time if is_timed else advice_on_use)(problem, bounds)
    advice = (*advice, *advice_on_splitting(question, found))
    notes = (
        *question.profile.notes,
        *(note_on_empty_devices(solution.assignment, solution.root, len(question.devices)) if is_timed else ()),
        *note_on_host(solution.host_optimizer, judged.once),
        *note_on_pieces(problem),
    )
    return Plan(
        assignment=solution.assignment,
        blocks=problem.profile.blocks,
        devices=question.devices,
        budgets=question.budgets,
        peaks=judged.peaks,
        root=solution.root,
        policy=question.policy,
        loose=problem.profile.loose,
        step_time=judged.seconds,
        stages=judged.stages,
        saving=solution.saving,
        streamed=solution.streamed,
        host_optimizer=solution.host_optimizer,
        objective="step time" if is_timed else "largest use",
        value=value,
        bounds=bounds,
        optimal=found.proved,
        advice=advice,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        accumulated=question.accumulated,
        batch=question.profile.batch,
        notes=notes,
        fingerprint=question.profile.fingerprint,
        profile=question.profile,
        question=question.arguments,
    )


def _least_use(problem: Problem) -> float | None:
    """The smallest largest use of all plans of this kind, where it is proved."""
    best = problem.solve(balanced)
    return best.key[0] if best is not None and best.proved else None


def _excess(extra: float | str) -> int:
    return 0 if isinstance(extra, int | float) and extra < 0 else parse_size(extra)


def _may(name: str, value: bool | str) -> bool | None:
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} does not exist; choose 'auto', True or False")
    return value
