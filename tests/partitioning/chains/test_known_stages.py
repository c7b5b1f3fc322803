from __future__ import annotations

from autobalance.devices.words import parse_devices
from autobalance.partitioning.chains.chain import build_chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.policies import balanced
from autobalance.partitioning.chains.problem import Problem
from autobalance.partitioning.savings.saver import Allowed
from autobalance.profiling.profile import Profile


def _problem(profile: Profile, budgets: tuple[int, ...], allowed: Allowed | None = None) -> Problem:
    chain = build_chain(profile, {}, None, free_pins=False)
    return Problem(profile, chain, parse_devices(list(budgets)), budgets, allowed=allowed)


def test_what_was_found_larger_is_told_and_searched_around() -> None:
    problem = _problem(Profile.from_costs([4, 4, 4]), (10, 10))
    found = problem.solve(balanced)
    assert found is not None
    assert found.stages in {((0, 0, 1), (1, 1, 3)), ((0, 0, 2), (1, 2, 3))}
    sizes = [4 * (stop - start) for _, start, stop in found.stages]
    assert problem.told(found) == sizes
    assert not problem.learn(found, [0, 0]), "nothing stood above what was told"
    assert problem.learn(found, [1 if size == 8 else 0 for size in sizes])
    assert problem.told(found) == [size + (size == 8) for size in sizes]
    # The other way to cut is now the better one, until it is known for larger as well.
    other = problem.solve(balanced)
    assert other is not None
    assert other.stages != found.stages
    assert other.key[0] == 0.8
    again = [3 if stop - start == 2 else 0 for _, start, stop in other.stages]
    assert problem.learn(other, again)
    last = problem.solve(balanced)
    assert last is not None
    assert last.stages == found.stages
    assert last.key[0] == 0.9
    assert not problem.found_larger([Kind((0, 1), 11)]), "of devices with another budget nothing was found"


def test_a_stage_that_saves_is_told_for_full_and_saves_more_when_it_held_more() -> None:
    # 30 bytes that stay and 60 saved: with 70, one block runs again, which leaves no room.
    profile = Profile.from_costs([10] * 3, saved=[20] * 3, forward_time=[1, 2, 4], backward_time=[2, 4, 8])
    problem = _problem(profile, (70,), Allowed(recompute=True, offload=False, host_memory=0))
    found = problem.solve(balanced)
    assert found is not None
    assert found.saving == ("recompute", "keep", "keep")
    assert problem.told(found) == [70]
    assert problem.learn(found, [1])
    again = problem.solve(balanced)
    assert again is not None
    assert again.saving == ("recompute", "recompute", "keep")
