"""What would make a question that has no plan have one, each with the plan that it would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autobalance.partitioning.budgets import host_budget
from autobalance.partitioning.candidate import Candidate, best_candidate
from autobalance.partitioning.question import EXECUTABLE, RECOMPUTES, Question

# Numbers of micro-batches that are tried, as multiples of the number of devices.
_SPLITS = (1, 2, 4)


def remedies(question: Question) -> Iterator[str]:
    """Options that would let a plan fit, in words, the cheapest first; what the question allows already is left out.

    Example:
        >>> list(remedies(question))
        ["schedule='1f1b', micro_batches=4: every device would then use 91% of its budget at most, ..."]

    Args:
        question: without an answer.
    """
    batch = question.profile.batch_size
    can_split = batch > 1 and len(question.profile.timeline.per_sample) == len(question.profile.timeline.sizes)
    counts = sorted({min(batch, times * len(question.devices)) for times in _SPLITS} - {0, 1}) if can_split else []
    splits = [("1f1b", count) for count in counts if question.schedules == ("naive",)]
    for schedule, count in splits:
        found = _answer(question, schedule, count)
        if found is not None:
            yield f"schedule={schedule!r}, micro_batches={count}: {_told(found)}"
            break
    present = next(iter(question.splits))
    if not question.recompute:
        found = _answer(replace(question, policy="auto", recompute=True), *present)
        if found is not None:
            yield f"recompute=True: {_told(found)}"
        for schedule, count in splits if found is None else ():
            found = _answer(replace(question, policy="auto", recompute=True), schedule, count)
            if found is not None:
                yield f"recompute=True, schedule={schedule!r}, micro_batches={count}: {_told(found)}"
                break
    if not question.offload:
        found = _answer(replace(question, policy="auto", offload=True, host_memory=host_budget(None)), *present)
        if found is not None:
            yield f"offload=True: {_told(found)}"


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
    if found.judged.seconds:
        words.append(f"a step takes {found.judged.seconds:.3g} s")
    runs = found.problem.schedule in EXECUTABLE and (RECOMPUTES or not saving) and not streamed
    return ", ".join(words) + ("" if runs else " (which can be planned, but not run yet)")
