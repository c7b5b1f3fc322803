"""Random questions of every kind, what the planner answers, and where it and the judge differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import autobalance
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.plan import Plan
from tests.partitioning.brute_force import EPSILON, NEAR, Best, Machine, Question, key_of, outcome

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
FLOPS = 1e13


def ask(question: Question) -> Plan | None:
    """The planner's answer; None: it says that nothing fits.

    Example:
        >>> ask(question)
    """
    profile = autobalance.Profile.from_costs(
        question.static,
        question.saved,
        question.transient,
        question.forward,
        question.backward,
        question.transfer,
        together=[question.group] if question.group else [],
        batch_size=question.samples,
    )
    devices = [
        Device(
            f"device {at}",
            machine.budget,
            flops=FLOPS / machine.slowness,
            link=machine.link,
            node=machine.node,
            network=machine.network,
            host_link=machine.host_link,
        )
        for at, machine in enumerate(question.machines)
    ]
    try:
        return autobalance.plan(
            profile,
            devices,
            policy=question.policy,
            micro_batches=question.micro_batches,
            schedule=question.schedules,
            recompute="recompute" in question.savings,
            offload="offload" in question.savings,
            pin={f"block{block}": device for block, device in question.pins.items()},
            cache=False,
        )
    except InfeasiblePlanError:
        return None


def differences(question: Question, wanted: Best | None) -> list[str]:
    """Where the planner's answer and the judge's differ, in words; empty: nowhere.

    Example:
        >>> assert not differences(question, best(question))
    """
    plan = ask(question)
    if plan is None or wanted is None:
        words = {False: "a plan", True: "no plan"}
        return (
            []
            if plan is None and wanted is None
            else [f"the planner has {words[plan is None]}, the judge {words[wanted is None]}"]
        )
    saving = [word + "+stream" * (block in plan.streamed) for block, word in enumerate(plan.saving or _kept(question))]
    found = outcome(question, plan.assignment, saving, plan.micro_batches, plan.schedule)
    value = found.step_time if plan.objective == "step time" else max(found.uses)
    said = [
        *(f"block {block} is not on its device" for block, at in question.pins.items() if plan.assignment[block] != at),
        *(["the group is apart"] if len({plan.assignment[block] for block in question.group}) > 1 else []),
        *(["it is over a budget"] if any(use > 1 for use in found.uses) else []),
        *_apart("peaks", plan.peaks, found.peaks),
        *_apart("step time", (plan.step_time,), (found.step_time,)),
        *_apart("value", (plan.value,), (value,)),
        *_false_bounds(question, plan, wanted),
    ]
    mine = key_of(question, found)
    wrong = [
        f"the policy's key is {mine} after {found.step_time} s, {key} in less than {NEAR} times {least} s is possible"
        for key, least in zip(wanted.keys, wanted.least_times, strict=True)
        if any(abs(a - b) > EPSILON * abs(b) for a, b in zip(mine, key, strict=True))
        or (question.policy == "auto" and found.step_time > NEAR * least * (1 + 2 * EPSILON))
    ]
    return [*said, *(wrong if len(wrong) == len(wanted.keys) else [])]


def _false_bounds(question: Question, plan: Plan, wanted: Best) -> list[str]:
    """Bounds above what is possible; those of uses hold for stages that keep all they save."""
    if len(question.savings) > 1 and question.policy != "auto":
        return []
    possible = {"auto": max(wanted.least_times), "balanced": max(key[0] for key in wanted.keys)}
    most = min(plan.value, possible.get(question.policy, plan.value)) * (1 + EPSILON)
    return [f"the bound {name} is {bound}, {most} is possible" for name, bound in plan.bounds.items() if bound > most]


def _kept(question: Question) -> list[str]:
    return ["keep"] * len(question.blocks)


def _apart(what: str, said: tuple[float, ...], true: tuple[float, ...]) -> list[str]:
    if all(abs(a - b) <= EPSILON * abs(b) for a, b in zip(said, true, strict=True)):
        return []
    return [f"{what}: the plan says {said}, the walk {true}"]


def chain(rng: random.Random, blocks: int = 7) -> Question:
    """A chain over equal machines, one micro-batch."""
    count = rng.randint(2, blocks)
    samples = rng.choice((1, 2, 4, 6))

    def sizes(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(samples * rng.randint(least, most) for _ in range(count))

    def seconds(most: float) -> tuple[float, ...]:
        return tuple(rng.uniform(0.1, most) for _ in range(count))

    question = Question(
        static=tuple(rng.randint(1, 60) for _ in range(count)),
        saved=sizes(12),
        transient=sizes(8),
        transfer=(*sizes(6)[:-1], 0),
        forward=seconds(1.0),
        backward=seconds(2.0),
        machines=(Machine(1),) * rng.randint(1, min(count, 4)),
        policy=rng.choice(POLICIES),
        samples=samples,
    )
    return _budgeted(rng, question)


def _budgeted(rng: random.Random, question: Question, most: float = 2.2) -> Question:
    """With budgets that are tight more often than not, in proportion to what the machines have as budgets now."""
    parts = max(question.micro_batches)
    at_once = parts if "gpipe" in question.schedules else min(parts, 1 + len(question.machines) // 2)
    activations = question.share(sum(question.saved) * at_once + max(question.transient), parts)
    total = (sum(question.static) + activations) * rng.uniform(min(0.8, most / 2), most)
    shares = sum(machine.budget for machine in question.machines)
    machines = (replace(each, budget=max(1, round(total * each.budget / shares))) for each in question.machines)
    return replace(question, machines=tuple(machines))


def device_types(rng: random.Random) -> Question:
    """A chain over machines of up to three kinds, in any order, some on another node."""
    question = chain(rng, blocks=6)
    kinds = [Machine(rng.randint(2, 9), rng.choice((1.0, 1.7, 3.0)), rng.choice((20.0, 50.0, 200.0))) for _ in range(2)]
    machines = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        machines = [replace(each, node=rng.randrange(2), network=rng.choice((5.0, 20.0))) for each in machines]
    return _budgeted(rng, replace(question, machines=tuple(machines)))


def in_flight(rng: random.Random) -> Question:
    """Several micro-batches in a given schedule, with the saved bytes of all that are in flight."""
    question = device_types(rng) if rng.random() < 0.5 else chain(rng, blocks=6)
    samples = rng.choice((2, 3, 4, 6))
    factor: dict[str, Any] = {what: tuple(samples * size for size in getattr(question, what)) for what in _BYTES}
    parts = rng.randint(2, samples)
    schedule = rng.choice(("gpipe", "1f1b"))
    question = replace(question, **factor, samples=samples, micro_batches=(parts,), schedules=(schedule,))
    return _budgeted(rng, question)


_BYTES = ("saved", "transient", "transfer")


def recomputing(rng: random.Random) -> Question:
    """Blocks may run their forward again instead of keeping what it saves; budgets are too small to keep all."""
    return _short(rng, ("keep", "recompute"), blocks=6)


def offloading(rng: random.Random) -> Question:
    """Saved bytes may also wait in host memory, and weights may be there."""
    savings = rng.choice((("keep", "offload"), ("keep", "recompute", "offload")))
    return _short(rng, (*savings, *(f"{saving}+stream" for saving in savings)), blocks=4)


def _short(rng: random.Random, savings: tuple[str, ...], blocks: int) -> Question:
    question = rng.choice((chain, device_types, in_flight))(rng)
    question = _first(question, blocks)
    # Much is saved, so that saving it otherwise decides.
    saved = tuple(rng.randint(2, 5) * size for size in question.saved)
    question = _budgeted(rng, replace(question, saved=saved), most=1.1)
    machines = tuple(replace(each, host_link=rng.choice((20.0, 100.0, 500.0))) for each in question.machines)
    return replace(question, machines=machines, savings=savings)


def _first(question: Question, blocks: int) -> Question:
    """The first blocks of a chain."""
    columns: dict[str, Any] = {
        what: getattr(question, what)[:blocks] for what in ("static", *_BYTES, "forward", "backward")
    }
    columns["transfer"] = (*columns["transfer"][:-1], 0)
    return replace(question, **columns)


def shared_group(rng: random.Random) -> Question:
    """Two or three blocks share a device, wherever they are in the call order."""
    question = rng.choice((chain, device_types))(rng)
    count = len(question.blocks)
    group = tuple(sorted(rng.sample(range(count), min(count, rng.choice((2, 2, 3))))))
    return _few_machines(replace(question, group=group))


def pinned(rng: random.Random) -> Question:
    """One or two blocks are on devices that the user has named."""
    question = _few_machines(rng.choice((chain, device_types))(rng))
    blocks = rng.sample(question.blocks, min(len(question.blocks), rng.choice((1, 1, 2))))
    return replace(question, pins={block: rng.randrange(len(question.machines)) for block in blocks})


def _few_machines(question: Question) -> Question:
    return replace(question, machines=question.machines[:3])


def joint(rng: random.Random) -> Question:
    """The number of micro-batches and the schedule are free."""
    question = in_flight(rng)
    parts = tuple(range(1, question.samples + 1))
    return replace(question, micro_batches=parts, schedules=("naive", "gpipe", "1f1b"))


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "chain": chain,
    "device types": device_types,
    "in flight": in_flight,
    "recompute": recomputing,
    "offload": offloading,
    "shared group": shared_group,
    "pins": pinned,
    "joint": joint,
}
"""From a generator of random numbers to a question of each kind."""
