"""What would make a question that has no plan have one, each with the plan that it would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autobalance.partitioning.budgets import host_budget
from autobalance.partitioning.candidate import Candidate, best_candidate
from autobalance.partitioning.question import Question
from autobalance.units import format_size

# Numbers of micro-batches that are tried, as multiples of the number of devices.
_SPLITS = (1, 2, 4)
# Bytes of host memory that no plan reaches.
_ANY = 2**62


def remedies(question: Question) -> Iterator[str]:
    """Options that would let a plan fit, in words, the cheapest first; what the question allows already is left out.

    Example:
        >>> list(remedies(question))
        ["schedule='1f1b', micro_batches=4: every device would then use 91% of its budget at most, ..."]

    Args:
        question: without an answer.
    """
    question = replace(question, solver=False)
    batch = question.profile.batch_size
    can_split = question.profile.is_scalable
    counts = sorted({min(batch, times * len(question.devices)) for times in _SPLITS} - {0, 1}) if can_split else []
    splits = [("1f1b", count) for count in counts if question.schedules == ("naive",)]
    for schedule, count in splits:
        found = _answer(question, schedule, count)
        if found is not None:
            yield f"schedule={schedule!r}, micro_batches={count}: {_told(found)}"
            break
    present = next(iter(question.splits))
    if question.policy != "balanced_low_0":
        found = _answer(replace(question, policy="balanced_low_0"), *present)
        if found is not None:
            yield f"policy='balanced_low_0', which keeps batch, loss and outputs on device 0: {_told(found)}"
    if question.allowed is None or not question.allowed.recompute:
        found = _answer(replace(question, policy="auto", recompute=True), *present)
        if found is not None:
            yield f"recompute=True: {_told(found)}"
        for schedule, count in splits if found is None else ():
            found = _answer(replace(question, policy="auto", recompute=True), schedule, count)
            if found is not None:
                yield f"recompute=True, schedule={schedule!r}, micro_batches={count}: {_told(found)}"
                break
    yield from _with_host_memory(replace(question, policy="auto", offload=True), *present, is_new=not question.offload)


def _with_host_memory(question: Question, schedule: str, count: int, *, is_new: bool) -> Iterator[str]:
    """What offloading would do with the host memory that there is, or how much of it is missing.

    Args:
        question: that may offload.
        schedule: of the micro-batches.
        count: how many there are.
        is_new: whether that was not allowed before.
    """
    host = host_budget(None) if is_new else question.host_memory
    if is_new and (found := _answer(replace(question, host_memory=host), schedule, count)) is not None:
        yield f"offload=True: {_told(found)}"
    elif (found := _answer(replace(question, host_memory=_ANY), schedule, count)) is not None:
        needed = found.solution.pinned
        yield (
            f"{'offload=True with ' * is_new}more host memory: {format_size(needed)} would do, "
            f"{format_size(host)} may be used, {format_size(needed - host)} missing "
            f"(max_memory={{'cpu': {needed}}}): {_told(found)}"
        )


def _answer(question: Question, schedule: str, count: int) -> Candidate | None:
    try:
        return best_candidate(question, schedule, count)[1]
    except ValueError:
        return None  # the profile does not know what smaller batches take


def _told(found: Candidate) -> str:
    """A plan in a few words."""
    uses = [peak / max(1, budget) for peak, budget in zip(found.judged.peaks, found.problem.budgets, strict=True)]
    words = [f"every device would use {max(uses):.0%} of its budget at most"]
    saving, streamed = found.solution.saving, found.solution.streamed
    for word, does in (("recompute", "recompute"), ("offload", "offload what they save")):
        if count := sum(each == word for each in saving):
            words.append(f"{count} of {len(saving)} blocks {does}")
    if streamed:
        words.append(f"the weights of {len(streamed)} blocks stream from the host")
    if count := len(found.solution.host_optimizer):
        words.append(f"the optimizer of {count} device{'s' * (count > 1)} is on the host")
    if found.judged.seconds:
        words.append(f"a step takes {found.judged.seconds:.3g} s")
    return ", ".join(words)
