from __future__ import annotations

import random
from itertools import permutations

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.chains.arrivals import Arrivals
from autobalance.partitioning.chains.chain import Chain, Item
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.times import stages_of
from autobalance.partitioning.transfers import Crossing
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT

CHAIN = Chain(((0,), (1,), (2, ROOT)), (), {})
PASSED_ON = (Crossing(0, (1,), 10, True), Crossing(1, (2,), 100, True))


def _devices(*links: float, nodes: tuple[int, ...] = ()) -> tuple[Device, ...]:
    places = nodes or (0,) * len(links)
    return tuple(
        Device(f"d{at}", 1, link=link, node=node, network=0.5)
        for at, (link, node) in enumerate(zip(links, places, strict=True))
    )


def test_on_equal_links_the_kind_before_makes_no_difference() -> None:
    arrivals = Arrivals(CHAIN, _devices(2.0, 2.0), PASSED_ON, training=True)
    (table,) = arrivals.tables([Kind((0, 1), 1)], width=3)
    # There and back; into stages that begin with unit 1 or 2, however long they are.
    assert table[0].tolist() == [[0.0, 0.0, 0.0], [10.0, 10.0, 0.0], [100.0, 0.0, 0.0]]


def test_without_training_nothing_comes_back() -> None:
    (table,) = Arrivals(CHAIN, _devices(2.0, 2.0), PASSED_ON, training=False).tables([Kind((0, 1), 1)], width=2)
    assert table[0].tolist() == [[0.0, 0.0], [5.0, 5.0], [50.0, 0.0]]


def test_what_is_passed_on_takes_the_link_from_the_kind_before() -> None:
    devices = _devices(4.0, 4.0, 1.0, nodes=(0, 0, 0))
    fast, slow = Arrivals(CHAIN, devices, PASSED_ON, training=False).tables([Kind((0, 1), 1), Kind((2,), 1)], width=1)
    assert fast[:2, :, 0].tolist() == [[0.0, 10 / 4, 100 / 4], [0.0, 10.0, 100.0]]
    assert slow[0, :, 0].tolist() == [0.0, 10.0, 100.0]
    assert fast[-1, 0, 0] == slow[-1, 0, 0] == 0.0, "nothing comes into the first stage"


def test_between_nodes_it_takes_the_network() -> None:
    devices = _devices(4.0, 4.0, 4.0, 4.0, nodes=(0, 0, 1, 1))
    kinds = [Kind((0, 1), 1), Kind((2, 3), 1)]
    one, other = Arrivals(CHAIN, devices, PASSED_ON, training=False).tables(kinds, width=1)
    assert one[:2, 1, 0].tolist() == [10 / 4, 10 / 0.5]
    assert other[:2, 1, 0].tolist() == [10 / 0.5, 10 / 4]


def test_what_goes_further_than_the_next_stage_is_never_priced_too_high() -> None:
    further = (Crossing(0, (1, 2), 10, False),)
    devices = _devices(4.0, 4.0, 1.0)
    fast, slow = Arrivals(CHAIN, devices, further, training=False).tables([Kind((0, 1), 1), Kind((2,), 1)], width=1)
    assert fast.shape[0] == 1
    assert fast[0, :, 0].tolist() == [0.0, 10 / 4, 10 / 4]
    assert slow[0, :, 0].tolist() == [0.0, 10.0, 10.0]


def test_what_an_item_sends_and_takes_goes_over_the_link_to_its_device() -> None:
    chain = Chain(((1,), (2, ROOT)), (Item((0,), None),), {})
    crossings = (Crossing(0, (1,), 10, True), Crossing(2, (0,), 100, False))
    devices = _devices(2.0, 1.0, 2.0)
    kinds = [Kind((0, 2), 1), Kind((1,), 1, items=frozenset({0}))]
    others, own = Arrivals(chain, devices, crossings, training=True).tables(kinds, width=2)
    # The gradient comes back to the item; what block 2 sends it counts with the stage of block 2.
    assert others[0].tolist() == [[20.0, 120.0], [100.0, 0.0]]
    assert own[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_single_device_receives_nothing() -> None:
    (table,) = Arrivals(CHAIN, _devices(2.0), PASSED_ON, training=True).tables([Kind((0,), 1)], width=3)
    assert not table.any()


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_devices_receives_faster_than_the_tables_say(seed: int) -> None:
    draw = random.Random(seed)
    most = draw.choice([1, 2])  # where there is one link and one node, all are alike
    devices = tuple(
        Device(f"d{at}", 1, link=float(draw.randint(1, most)), node=draw.randint(0, most - 1), network=0.5)
        for at in range(3)
    )
    crossings = []
    for source in draw.choices([0, 1, 2, ROOT], k=draw.randint(1, 4)):
        later = [owner for owner in (0, 1, 2, ROOT) if owner == ROOT != source or owner > source]
        crossings.append(Crossing(source, tuple(draw.sample(later, min(len(later), draw.randint(1, 2)))), 10, True))
    profile = Profile.from_costs([1, 1, 1])
    tables = Arrivals(CHAIN, devices, tuple(crossings), training=True).tables([Kind((at,), 1) for at in range(3)], 3)
    is_exact = len({(device.link, device.node) for device in devices}) == 1
    for order in permutations(range(3)):
        stages = stages_of(profile, order, order[-1], devices, crossings)
        for number, (device, stage) in enumerate(zip(order, stages, strict=True)):
            before = order[number - 1] if number and len(tables[device]) > 1 else -1
            seconds = tables[device][before, number, 0]
            assert seconds == pytest.approx(stage.receive_time) if is_exact else seconds <= stage.receive_time + 1e-9
