from __future__ import annotations

import pytest

from autobalance.partitioning.chains.chain import Item, build_chain
from autobalance.partitioning.chains.shared_values import EVERYWHERE, NOWHERE
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import HOST, ROOT

PROFILE = Profile.from_costs([1] * 5, together=[(1, 2), (0, 4)])


def test_neighbours_become_a_unit_and_far_groups_an_item() -> None:
    chain = build_chain(PROFILE, {}, None, free_pins=False)
    assert chain.units == ((1, 2), (3,))
    assert chain.items == (Item((0, 4, ROOT), None),)


def test_a_policy_may_take_the_root_from_the_last_block() -> None:
    chain = build_chain(PROFILE, {}, 0, free_pins=False)
    assert chain.items == (Item((0, 4), None), Item((ROOT,), 0))


def test_pins_bind_units_or_free_them() -> None:
    bound = build_chain(PROFILE, {2: 1}, None, free_pins=False)
    assert (bound.units, dict(bound.bound)) == (((1, 2), (3,)), {0: 1})
    free = build_chain(PROFILE, {2: 1}, None, free_pins=True)
    assert (free.units, dict(free.bound)) == (((3,),), {})
    assert Item((1, 2), 1) in free.items


def test_a_pin_of_the_root_wins_over_the_policy() -> None:
    assert Item((ROOT,), 3) in build_chain(PROFILE, {ROOT: 3}, 0, free_pins=False).items


def test_storages_are_seen_from_the_stage() -> None:
    chain = build_chain(PROFILE, {}, None, free_pins=False)
    owners = [0, 1, 2, 3, 4, ROOT, HOST]
    assert chain.places(owners, frozenset()) == [NOWHERE, 0, 0, 1, NOWHERE, NOWHERE, NOWHERE]
    assert chain.places(owners, frozenset({0})) == [EVERYWHERE, 0, 0, 1, EVERYWHERE, EVERYWHERE, NOWHERE]


def test_cuts_and_item_devices_give_every_block_its_device() -> None:
    chain = build_chain(PROFILE, {}, None, free_pins=False)
    assert chain.assignment([(0, 0, 1), (1, 1, 2)], (1,)) == ((1, 0, 0, 1, 1), 1)


def test_pins_that_pull_a_group_apart_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'block1' on device 0 and 'block2' on device 1, but they must share a device"):
        build_chain(PROFILE, {1: 0, 2: 1}, None, free_pins=False)
