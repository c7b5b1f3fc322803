from __future__ import annotations

from autobalance.partitioning.orders.independent import independent_parts
from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT, Timeline

TRACED = Timeline((1, 1), (0, 1), (0, 0), (1, 2))
"""A timeline in which a tensor is copied from one block to another."""


def _passing(*pairs: tuple[int, int]) -> list[Crossing]:
    return [Crossing(source, (target,), 4, True) for source, target in pairs]


def _blocks(count: int) -> list[tuple[int, ...]]:
    return [(block,) for block in range(count)]


def test_chains_between_which_only_the_batch_and_the_loss_pass_are_independent() -> None:
    batch = Crossing(ROOT, (0, 3), 8, False)
    results = [Crossing(block, (ROOT,), 4, True) for block in (2, 5)]
    chains = _passing((0, 1), (1, 2), (3, 4), (4, 5))
    units = [*_blocks(5), (5, ROOT)]
    assert independent_parts(TRACED, [batch, *chains, *results], units) == ((0, 3), (3, 6))


def test_one_tensor_from_chain_to_chain_makes_them_one() -> None:
    chains = _passing((0, 1), (1, 2), (3, 4), (4, 5))
    assert independent_parts(TRACED, [*chains, *_passing((0, 5))], _blocks(6)) == ((0, 6),)
    assert independent_parts(TRACED, [*chains, *_passing((5, 1))], _blocks(6)) == ((0, 6),)


def test_units_of_several_blocks_count_as_one_and_blocks_beside_the_chain_pass_nothing() -> None:
    # Block 2 stands beside the chain; what it takes from block 1 and gives to block 3 is no tie between units.
    chains = _passing((0, 1), (1, 2), (2, 3), (3, 4))
    assert independent_parts(TRACED, chains, [(0, 1), (3,), (4,)]) == ((0, 1), (1, 3))


def test_a_profile_by_hand_is_one_chain_whatever_passes() -> None:
    timeline = Profile.from_costs([4] * 4).timeline
    assert independent_parts(timeline, [], _blocks(4)) == ((0, 4),)
