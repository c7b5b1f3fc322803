from __future__ import annotations

from autobalance.devices.device import Device
from autobalance.partitioning.chains.chain import Chain, Item
from autobalance.partitioning.chains.kinds import Kind, kinds_for, merged

PLAIN = Chain(((0,), (1,), (2,)), (), {})


def _devices(*budgets: int, flops: dict[int, float] | None = None) -> list[Device]:
    speeds = flops or {}
    return [Device(f"d{at}", budget, flops=speeds.get(at, 1e12)) for at, budget in enumerate(budgets)]


def test_devices_of_one_budget_and_speed_are_a_kind() -> None:
    devices = _devices(8, 4, 8, 8, flops={3: 2e12})
    assert kinds_for(devices, (8, 4, 8, 8), (0,) * 4, PLAIN, ()) == (Kind((0, 2), 8), Kind((1,), 4), Kind((3,), 8))


def test_devices_that_stand_above_the_replay_by_other_amounts_are_told_apart() -> None:
    devices = _devices(8, 8, 8)
    assert kinds_for(devices, (8,) * 3, (1, 0, 1), PLAIN, ()) == (Kind((0, 2), 8, excess=1), Kind((1,), 8))


def test_a_device_with_items_or_bound_units_stands_by_itself() -> None:
    chain = Chain(((0,), (1,)), (Item((2,), None), Item((3,), None)), {1: 3})
    assert kinds_for(_devices(*[8] * 5), (8,) * 5, (0,) * 5, chain, (1, 1)) == (
        Kind((0, 2, 4), 8),
        Kind((1,), 8, items=frozenset({0, 1})),
        Kind((3,), 8, units=(1,)),
    )


def test_too_many_kinds_become_fewer_where_the_least_is_given_up() -> None:
    kinds = [Kind((0,), 10), Kind((1,), 19, excess=2), Kind((2,), 20), Kind((3,), 20, items=frozenset({0}))]
    assert merged(kinds, most=16) == tuple(kinds), "four devices of their own: two to the fourth states"
    # 19 and 20 lie nearest, and the kind with an item stays as it is.
    assert merged(kinds, most=15) == (kinds[0], Kind((1, 2), 19, excess=2), kinds[3])
    assert merged(kinds, most=11) == (Kind((0, 1, 2), 10, excess=2), kinds[3])
    assert merged(kinds, most=1) == (Kind((0, 1, 2), 10, excess=2), kinds[3]), "nothing more can be made one"
