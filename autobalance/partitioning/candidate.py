"""The best plan for one schedule and one number of micro-batches, replayed until its peaks are true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autobalance.partitioning.allocator_check import needs_of
from autobalance.partitioning.chains.boundaries import with_better_boundaries
from autobalance.partitioning.chains.chain import Chain, build_chain
from autobalance.partitioning.chains.policies import NEARLY, POLICIES, balanced, fastest
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.chains.solution import Solution
from autobalance.partitioning.judge import Judged
from autobalance.partitioning.micro_profiles import micro_profile
from autobalance.partitioning.orders.folded import folded_chain
from autobalance.partitioning.orders.looped import best_loop
from autobalance.partitioning.question import Question
from autobalance.partitioning.savings.saver import Allowed
from autobalance.partitioning.transfers import crossings_of

# Searches after each of which the stages that turned out larger are known better.
_TRIES = 32
# Searches for better boundaries, each with more room than the one before.
_MARGINS = 4
# Share of a budget by which a replay may differ from the tables without another search.
_SLIGHT = 0.01
# Those after which a search that proves nothing is content with what fits.
_TRIES_WITHOUT_PROOF = 12
# A pinned block out of call order, and a device that is visited again, cost transfers; they have to lower what the
# policy minimises by more than this share.
_PRICE_OF_DISORDER = 0.05


@dataclass(frozen=True)
class Candidate:
    """A partition as it is, beside what the search knew.

    Attributes:
        problem: it solves.
        solution: as found.
        judged: its replay.
        key: what the policy minimises, as the replay has it.
        proved: whether no other plan of this kind has a smaller key.
        least: lower bound of the first of the key; None where it is not proved.
        is_loop: whether stages visit devices round after round.
    """

    problem: Problem
    solution: Solution
    judged: Judged
    key: tuple[float, ...]
    proved: bool
    least: float | None
    is_loop: bool = False


def best_candidate(
    question: Question, schedule: str, micro_batches: int, limit: float | None = None
) -> tuple[Problem, Candidate | None]:
    """The best partition for one way to split the batch.

    Example:
        >>> problem, found = best_candidate(question, "1f1b", 8)

    Args:
        question: as asked.
        schedule: of the micro-batches.
        micro_batches: how many there are.
        limit: seconds of a step within which the lightest partition is wanted; None: nearly the least of this way.

    Returns:
        The problem, and None where budgets leave no way.
    """
    profile = micro_profile(question.profile, micro_batches, schedule=schedule, accumulated=question.accumulated)
    crossings = crossings_of(profile)
    root = 0 if question.policy == "balanced_low_0" else None
    chains = [
        build_chain(profile, dict(question.pins), root, free_pins=free_pins)
        for free_pins in ((False, True) if question.pins else (False,))
    ]

    def problem_of(chain: Chain, allowed: Allowed | None = None) -> Problem:
        given = question.devices, question.budgets, question.excess, schedule, micro_batches, crossings
        return Problem(profile, chain, *given, allowed=allowed, limit=limit)

    best: Candidate | None = None
    for chain in chains:
        problem = problem_of(chain, question.allowed)
        found = _whether_they_wait_or_not(problem, question)
        if found is not None and (best is None or _is_worth_disorder(question.policy, found.key, best.key)):
            best = found
    plain = best if best is None or schedule != "looped" else replace(best, proved=False, least=None)
    best = plain
    # Folding saves transfers, of which other policies know nothing. With several micro-batches, the tables do not know
    # what is in flight in stages of a device that is visited twice.
    for chain in chains if question.policy == "auto" and micro_batches == 1 else ():
        folded = folded_chain(chain, crossings)
        found = None if folded is None else _settled(problem_of(folded), question)
        if found is not None and (best is None or _is_faster(found, best)):
            best = found
    chain = chains[0] if plain is None else plain.problem.chain
    found = _looped(problem_of(chain, question.allowed if question.policy == "auto" else None), question.policy, plain)
    if found is not None and (best is None or _is_worth_rounds(question.policy, found, best)):
        best = found
    return (problem if best is None else best.problem), best


def _is_faster(found: Candidate, best: Candidate) -> bool:
    """Whether the best of one chain takes less time than that of another one, or nearly the same and less memory."""
    (seconds, use), (least, least_use) = found.key, best.key
    is_nearly = max(seconds, least) <= (1 + NEARLY) * min(seconds, least)
    return use < least_use if is_nearly else seconds < least


def _looped(problem: Problem, policy: str, plain: Candidate | None) -> Candidate | None:
    found = best_loop(problem, policy, None if plain is None else plain.solution)
    if found is None or _needs(problem, found.solution, found.judged) != list(found.judged.peaks):
        return None
    return Candidate(problem, found.solution, found.judged, found.key, proved=False, least=None, is_loop=True)


def _is_worth_rounds(policy: str, found: Candidate, best: Candidate) -> bool:
    """Whether going over devices again takes less time or, in nearly the same, clearly less memory."""
    if policy != "auto":
        return _is_worth_disorder(policy, found.key, best.key)
    (_, use), (least, least_use) = found.key, best.key
    # The lightest of several ways to go round takes nearly the least of these, not of all.
    seconds, limit = found.judged.seconds, best.problem.limit
    if limit is not None:
        least = best.judged.seconds
    if max(seconds, least) > ((1 + NEARLY) * min(seconds, least) if limit is None else limit * (1 + 1e-9)):
        return seconds < least
    return _is_worth_disorder(policy, (use,), (least_use,))


def _whether_they_wait_or_not(problem: Problem, question: Question) -> Candidate | None:
    """The best partition, where devices that are visited twice may have to wait, or may not."""
    found = _settled(problem, question)
    if question.policy != "auto" or problem.overlapping == problem.micro_batches:
        return found
    other = _settled(replace(problem, is_cautious=False, known={}, savers={}), question)
    return other if found is None or (other is not None and _is_faster(other, found)) else found


def _settled(problem: Problem, question: Question) -> Candidate | None:
    """Search, replay what was found, and search again with what the replay knew better, until nothing is new."""
    bound: tuple[float, ...] | None = None
    least: float | None = None
    best: Candidate | None = None
    for tried in range(_TRIES):
        solution = problem.solve(POLICIES[question.policy])
        if solution is None:
            break
        if bound is None:
            bound, least = solution.key, solution.bound
        judged = problem.judge(solution)
        needs = _needs(problem, solution, judged)
        more = [need - told for need, told in zip(needs, problem.told(solution), strict=True)]
        if problem.micro_batches > 1 and min(more) < 0 and not solution.saves_on:
            # The tables are no lower bound here, so that nothing they rule out is ruled out.
            solution, least = replace(solution, proved=False, bound=None), None
        if _fits(needs, question):
            key = _true_key(question.policy, question, solution, judged, problem.limit)
            # Of the step time; among plans that take nearly as long, use is only as well known as the tables are.
            compared = 1 if question.policy == "auto" else len(key)
            proved = solution.proved and _is_no_more(key[:compared], bound)
            if best is None or key < best.key:
                best = Candidate(problem, solution, judged, key, proved, least)
            # Without a proof, nothing but the time is left to better, of which memory that fits says nothing.
            is_enough = question.policy == "auto" if not solution.proved else proved and _is_no_more(key, bound)
            if is_enough or (_is_slight(more, question) and (proved or not solution.proved)):
                break
        is_hopeful = solution.proved or best is None or tried < _TRIES_WITHOUT_PROOF
        if max(more) <= 0 or not is_hopeful or not problem.learn(solution, more):
            break
    best = best or _beyond_tables(problem, question)
    if best is not None and not best.proved and question.policy == "auto":
        best = _fastest_if_faster(problem, question, best)
    return best if best is None or best.proved else _with_better_boundaries(best, question)


def _fastest_if_faster(problem: Problem, question: Question, best: Candidate) -> Candidate:
    """The way that the tables take for the fastest, where the one chosen among nearly as fast ones is not."""
    solution = problem.solve(fastest)
    if solution is None or solution.stages == best.solution.stages:
        return best
    judged = problem.judge(solution)
    key = judged.seconds, max(_uses(judged.peaks, question))
    found = Candidate(problem, solution, judged, key, proved=False, least=best.least)
    fits = _fits(_needs(problem, solution, judged), question)
    truly = replace(best, key=(best.judged.seconds, *best.key[1:]))
    return found if fits and _is_faster(found, truly) else best


def _beyond_tables(problem: Problem, question: Question) -> Candidate | None:
    """The best balanced partition, where the tables say of several micro-batches that it holds more than it does."""
    if problem.micro_batches == 1 or question.policy == "sequential":
        return None  # which knows no other order of devices than the given one
    solution = problem.solve(balanced, hard=False)
    if solution is None:
        return None
    judged = problem.judge(solution)
    if not _fits(_needs(problem, solution, judged), question):
        return None
    if problem.limit is not None and judged.seconds > problem.limit:
        return None
    if question.policy == "auto":
        key: tuple[float, ...] = judged.seconds, max(_uses(judged.peaks, question))
    else:
        key = _true_key(question.policy, question, solution, judged, problem.limit)
    return Candidate(problem, solution, judged, key, proved=False, least=None)


def _with_better_boundaries(best: Candidate, question: Question) -> Candidate:
    """The candidate, or one with other cuts where its step is shorter by the clock and its memory fits."""
    problem, solution = best.problem, best.solution
    is_plain = not (solution.saving or solution.streamed or solution.host_optimizer)
    if question.policy != "auto" or problem.micro_batches == 1 or not is_plain:
        return best
    margin = 1.0
    for _ in range(_MARGINS):
        moved = with_better_boundaries(problem, solution, margin)
        judged = problem.judge(moved)
        if judged.seconds >= best.judged.seconds:
            break
        if _fits(needs_of(problem, moved, judged), question):
            key = (judged.seconds, max(_uses(judged.peaks, question)))
            return Candidate(problem, moved, judged, key, proved=False, least=best.least)
        # More is in flight where a device is visited twice than the tables know.
        margin *= max(_uses(judged.peaks, question)) * (1 + _SLIGHT)
    return best


def _is_slight(more: Sequence[int], question: Question) -> bool:
    return all(extra <= _SLIGHT * budget for extra, budget in zip(more, question.budgets, strict=True))


def _needs(problem: Problem, solution: Solution, judged: Judged) -> list[int]:
    """What devices need, of which the problem remembers those whose allocator would run out."""
    needs = needs_of(problem, solution, judged)
    problem.ran_out.update(index for index, need in enumerate(needs) if need > judged.peaks[index])
    return needs


def _fits(peaks: Sequence[int], question: Question) -> bool:
    given = zip(peaks, question.excess, question.budgets, strict=True)
    return all(peak + known <= budget for peak, known, budget in given if peak)


def _uses(peaks: Sequence[int], question: Question) -> list[float]:
    given = zip(peaks, question.excess, question.budgets, strict=True)
    return [(peak + known if peak else 0) / max(1, budget) for peak, known, budget in given]


def _true_key(
    policy: str, question: Question, solution: Solution, judged: Judged, limit: float | None
) -> tuple[float, ...]:
    """What the policy minimises, with the peaks and times of the replay in place of those of the tables."""
    uses = _uses(judged.peaks, question)
    # A device that has to save memory counts as full.
    for device in solution.saves_on:
        uses[device] = max(1.0, uses[device])
    if policy == "auto":
        # The times of the tables leave out where exactly a tensor comes from, if that makes a difference.
        nearly = solution.key[0] * (1 + NEARLY) if limit is None else limit
        seconds = judged.seconds + judged.once
        return (solution.key[0] if seconds <= nearly * (1 + 1e-9) else seconds, max(uses))
    if policy == "balanced":
        return (max(uses),)
    if policy == "balanced_low_0":
        return (uses[0], max(uses[1:], default=0.0))
    return solution.key


def _is_no_more(key: tuple[float, ...], bound: tuple[float, ...]) -> bool:
    return all(mine <= least + 1e-9 * abs(least) for mine, least in zip(key, bound, strict=False))


def _is_worth_disorder(policy: str, key: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether a key is less than another by the price of leaving the call order, with nothing before it that is more.

    Of what `"auto"` minimises, nearly the same is not more.
    """
    alike = NEARLY if policy == "auto" else 0.0
    for mine, theirs in zip(key, other, strict=False):
        if mine < theirs - _PRICE_OF_DISORDER * abs(theirs):
            return True
        if mine > theirs + (alike + 1e-9) * abs(theirs):
            return False
    return False
