"""Whether micro-batches are worth their while: small ones can cost more time than devices that work at once save.

Nor do devices work at once as planned where a micro-batch goes back to a device between two stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from autobalance.partitioning.candidate import Candidate
from autobalance.partitioning.chains.policies import NEARLY
from autobalance.partitioning.judge import judge, seconds_of
from autobalance.partitioning.question import Question
from autobalance.partitioning.times import launch_seconds, launches_of
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.timeline import ROOT
from autobalance.units import format_time

# Share of a step's time from which on the host that launches its kernels is what decides it.
_MOST = 0.9


def advice_on_splitting(question: Question, found: Candidate) -> tuple[str, ...]:
    """What a plan with micro-batches loses by them, and what keeps them from flowing as planned.

    Example:
        >>> advice_on_splitting(question, found)
        ('the host decides how long this step takes: it launches 640 kernels in 3.20 ms, and ...',)

    Args:
        question: as asked.
        found: the best partition.

    Returns:
        Lines; none where batches stay whole, where nothing has times, and where micro-batches are worth it.
    """
    if found.problem.micro_batches == 1 or not found.judged.seconds:
        return ()
    return (*_bound_by_host(found), *_slower_than_whole(question, found), *_brought_back(found))


def _bound_by_host(found: Candidate) -> Iterator[str]:
    problem, step = found.problem, found.judged.seconds
    launching = problem.micro_batches * launch_seconds(problem.profile, problem.devices)
    if launching >= _MOST * step:
        kernels = problem.micro_batches * launches_of(problem.profile)
        yield (
            f"the host decides how long this step takes: it launches {kernels:,} kernels in {format_time(launching)}, "
            f"and devices wait for it; larger batches would take no longer, and fewer micro-batches less time"
        )


def _slower_than_whole(question: Question, found: Candidate) -> Iterator[str]:
    """Told where the same blocks fit with whole batches: else there is no choice."""
    problem, solution, step = found.problem, found.solution, found.judged.seconds
    batches = problem.micro_batches if question.accumulated else 1
    if batches == 1 and question.profile.batch_size <= problem.profile.batch_size:
        return  # of the largest part, not of the batch
    asked = question.profile, solution.assignment, solution.root, problem.devices, crossings_of(question.profile)
    whole = batches * seconds_of(*asked, schedule="naive", micro_batches=1)
    if (1 + NEARLY) * whole >= step:
        return
    peaks = judge(*asked).peaks
    if all(map(int.__le__, map(int.__add__, peaks, question.excess), question.budgets)):
        yield (
            f"whole batches, one device at a time, fit as well and would take {format_time(whole)}: micro-batches are "
            f"worth their time where a batch is larger; schedule='naive' keeps it whole"
        )


def _brought_back(found: Candidate) -> Iterator[str]:
    """The clock of a plan has no stage for what runs on an earlier device between two others."""
    names, assignment = found.problem.profile.names, found.solution.assignment
    back = {
        (crossing.source, assignment[target])
        for crossing in found.problem.crossings
        for target in crossing.targets
        if ROOT < target < crossing.source and assignment[target] != assignment[crossing.source]
    }
    if not back:
        return
    sources, devices = (sorted(set(column)) for column in zip(*back, strict=True))
    whose = f"{names[sources[0]]!r} and {len(sources) - 1} more return" if len(sources) > 1 else ""
    yield (
        f"what {whose or f'{names[sources[0]]!r} returns'} goes back to device "
        f"{', '.join(map(str, devices))}, where micro-batches wait for each other, so that a step can take longer than "
        f"predicted: a block is called again there, or an operation outside the blocks has its first operand there; a "
        f"sum is best inside the block, or with its output first: `layer(x) + x`"
    )
