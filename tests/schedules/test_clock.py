"""Clocks against closed formulas and an independent simulation."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from autobalance.schedules.clock import Hold, run_clock
from autobalance.schedules.launches import Launch, launch_order


def efficiency(schedule: str, devices: list[int], micro_batches: int) -> Fraction:
    """Busy time over all device time, with equal stages whose backward takes twice their forward."""
    stages = len(devices)
    order = launch_order(schedule, stages, micro_batches, devices=devices)
    slots = run_clock(order, devices, [1.0] * stages, [2.0] * stages, [0.0] * stages)
    span = max(slot.stop for slot in slots) * len(set(devices))
    return Fraction(3 * stages * micro_batches, 1) / Fraction(span)


def test_a_loop_of_two_visits_beats_1f1b_as_the_formula_says() -> None:
    assert efficiency("1f1b", [0, 1, 2, 3], 4) == Fraction(4, 7)
    assert efficiency("looped", [0, 1, 2, 3] * 2, 4) == Fraction(8, 11)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_equal_stages_are_as_busy_as_the_formulas_say(count: int) -> None:
    devices = list(range(count))
    for number in (1, count, 2 * count + 1, 4 * count):
        filled = Fraction(number, number + count - 1)
        assert efficiency("gpipe", devices, number) == filled
        assert efficiency("1f1b", devices, number) == filled
        assert efficiency("naive", devices, number) == Fraction(1, count)
    for visits in (2, 3):
        for number in (count, 3 * count):
            looped = efficiency("looped", devices * visits, number)
            assert looped == number / (number + Fraction(count - 1, visits))
    assert efficiency("looped", [*devices, *devices[::-1]], count) == Fraction(count, 2 * count - 1)


def relaxed(
    order: tuple[Launch, ...], devices: list[int], forward: list[float], backward: list[float]
) -> dict[tuple[int, int, bool], float]:
    """When each launch stops, by raising starts until every rule holds."""
    keys = [(launch.stage, launch.micro_batch, launch.backward) for launch in order]
    takes = {key: (backward if key[2] else forward)[key[0]] for key in keys}
    rules = [((stage, number, False), (stage, number, True)) for stage, number, is_back in keys if is_back]
    for stage, number, is_back in keys:
        following = (stage - 1 if is_back else stage + 1, number, is_back)
        if following in takes:
            rules.append(((stage, number, is_back), following))
    for device in set(devices):
        own = [key for key in keys if devices[key[0]] == device]
        rules += pairwise(own)
    starts = dict.fromkeys(keys, 0.0)
    changed = True
    while changed:
        changed = False
        for first, then in rules:
            if starts[first] + takes[first] > starts[then]:
                starts[then], changed = starts[first] + takes[first], True
    return {key: starts[key] + takes[key] for key in keys}


@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", [0, 1, 2]), ("gpipe", [2, 0]), ("looped", [0, 1, 1, 0])])
def test_clocks_keep_exactly_the_rules(schedule: str, devices: list[int]) -> None:
    chance = random.Random(3)
    stages = len(devices)
    forward, backward = ([float(chance.randint(1, 9)) for _ in devices] for _ in range(2))
    order = launch_order(schedule, stages, 5, devices=devices)
    slots = run_clock(order, devices, forward, backward, [0.0] * stages)
    found = {(slot.stage, slot.micro_batch, slot.backward): slot.stop for slot in slots}
    assert found == relaxed(order, devices, forward, backward)
    assert [slot.device for slot in slots] == [devices[launch.stage] for launch in order]
    assert all(slot.stop - slot.start == (backward if slot.backward else forward)[slot.stage] for slot in slots)


def test_receiving_takes_half_before_the_forward_and_half_with_the_backward() -> None:
    trained = run_clock(launch_order("naive", 2, 1), [0, 1], [1.0, 1.0], [2.0, 2.0], [0.0, 4.0])
    assert [(slot.stage, slot.start, slot.stop) for slot in trained] == [(0, 0, 1), (1, 1, 4), (1, 4, 8), (0, 8, 10)]
    alone = run_clock(launch_order("naive", 2, 1, training=False), [0, 1], [1.0, 1.0], [0.0, 0.0], [0.0, 4.0])
    assert [(slot.start, slot.stop) for slot in alone] == [(0, 1), (1, 6)]


def test_an_order_that_cannot_be_run_is_refused() -> None:
    order = (Launch(0, 0, False), Launch(0, 0, True), Launch(1, 0, False))
    with pytest.raises(ValueError, match="the backward of micro-batch 0 in stage 0 is launched before the backward of"):
        run_clock(order, [0, 1], [1.0] * 2, [1.0] * 2, [0.0] * 2)


def test_the_host_launches_nothing_while_it_waits_for_a_device() -> None:
    order = launch_order("gpipe", 2, 2, training=False)
    columns = [0, 1], [2.0, 5.0], [0.0, 0.0], [0.0, 0.0]
    # After 1 second of the forward on device 0: the second micro-batch is launched there once the first is that far.
    ahead = run_clock(order, *columns, holds=[[Hold(0, 1.0)], []])
    assert [(slot.device, slot.start, slot.stop) for slot in ahead] == [(0, 0, 2), (1, 2, 7), (0, 2, 4), (1, 7, 12)]
    # At the begin, for device 1, which is then done with all of the first micro-batch.
    behind = run_clock(order, *columns, holds=[[Hold(1, 0.0)], []])
    assert [(slot.device, slot.start, slot.stop) for slot in behind] == [(0, 0, 2), (1, 2, 7), (0, 2, 9), (1, 9, 14)]


def test_a_wait_for_the_first_device_makes_1f1b_wait_for_whole_backwards() -> None:
    stages, number = 3, 4
    order = launch_order("1f1b", stages, number)
    columns = range(stages), [1.0] * stages, [2.0] * stages, [0.0] * stages
    free = run_clock(order, *columns)
    held = run_clock(order, *columns, holds=[[Hold(0, 0.5)], [], []])
    assert max(slot.stop for slot in free) == (number + stages - 1) * 3
    # The forward of micro-batch 3 begins on device 0 after the backward of 0 there; only half of it later is the
    # backward of 1 launched, on devices that have been idle since.
    last = {(slot.micro_batch, slot.stage, slot.backward): slot for slot in held}
    assert last[3, 0, False].start == last[0, 0, True].stop
    assert last[1, 2, True].start == last[3, 0, False].start + 0.5


def test_devices_wait_for_a_host_that_launches_for_others() -> None:
    order = launch_order("gpipe", 2, 3, training=False)
    columns = [0, 1], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]
    slots = run_clock(order, *columns, launching=[(2.0, 0.0), (2.0, 0.0)])
    # A forward of 1 second whose last kernel is launched 2 seconds after its first; one after the other on the host.
    assert [(slot.start, slot.stop) for slot in slots] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]
    quick = run_clock(order, *columns, launching=[(0.25, 0.0), (0.25, 0.0)])
    assert [(slot.start, slot.stop) for slot in quick] == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4)]
