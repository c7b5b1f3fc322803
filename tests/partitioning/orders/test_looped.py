"""Looped plans against clocks by hand, a walk through their launches, and every way to cut."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise

import pytest

from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.judge import judge
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.replay import replay
from autobalance.partitioning.search import plan
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import Timeline
from autobalance.schedules.launches import launch_order


def _equal(static: list[int] | None = None) -> Profile:
    """Eight blocks that take 1 s forward and 2 s backward for each of four samples, and save 2 bytes of each."""
    given = static or [1] * 8
    return Profile.from_costs(given, saved=[8] * 8, forward_time=[4.0] * 8, backward_time=[8.0] * 8, batch_size=4)


def _efficiency(found: Plan) -> float:
    work = sum(block.forward_time + block.backward_time for block in found.blocks)
    return found.micro_batches * work / (len(found.devices) * found.step_time)


def _walked(found: Plan) -> tuple[int, ...]:
    """Peaks by a walk through the launches: static bytes once, transient ones up and down, saved ones to the end.

    Blocks that are recomputed keep of what they save their inputs, until they run again.
    """
    blocks, places = found.blocks, [stage.device for stage in found.stages]
    held = [sum(blocks[block].static for block in found.blocks_on(device)) for device in range(len(found.devices))]
    peaks = list(held)
    for launch in launch_order(found.schedule, len(places), found.micro_batches, devices=places):
        stage = found.stages[launch.stage]
        for block in reversed(stage.blocks) if launch.backward else stage.blocks:
            cost, here = blocks[block], stage.device
            again = bool(found.saving) and found.saving[block] == "recompute"
            rests = cost.inputs if again else cost.saved
            for change in (cost.forward_transient, -cost.forward_transient):
                held[here] += change
                peaks[here] = max(peaks[here], held[here])
            if launch.backward:
                held[here] += cost.saved - rests
                peaks[here] = max(peaks[here], held[here] + cost.backward_transient)
            held[here] += -cost.saved if launch.backward else rests
            peaks[here] = max(peaks[here], held[here])
    return tuple(peaks)


def test_two_visits_of_four_devices_keep_them_busy_for_8_11ths_of_the_time_where_1f1b_has_4_7ths() -> None:
    once = plan(_equal(), [100] * 4, schedule="1f1b", micro_batches=4)
    twice = plan(_equal(), [100] * 4, schedule="looped", micro_batches=4)
    assert _efficiency(once) == pytest.approx(float(Fraction(4, 7)))
    assert _efficiency(twice) == pytest.approx(float(Fraction(8, 11)))
    assert [stage.device for stage in twice.stages] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [stage.in_flight for stage in twice.stages] == [4] * 8
    assert not twice.optimal
    assert twice.bounds == {"area": 4 * 24 / 4, "indivisible block": 7 * 3 + 4 * 3}


def test_the_loop_is_taken_where_memory_allows_and_1f1b_where_it_does_not() -> None:
    # The loop holds 4 x 2 bytes of 2 blocks beside the large head, 1F1B a single micro-batch of them: 42 + 16 and + 4.
    profile = _equal([1] * 7 + [41])
    allowed = plan(profile, [58] * 4, schedule=("1f1b", "looped"), micro_batches=4)
    assert (allowed.schedule, allowed.step_time, allowed.peaks) == ("looped", 33.0, (18, 18, 18, 58))
    tight = plan(profile, [57] * 4, schedule=("1f1b", "looped"), micro_batches=4, recompute=False)
    assert (tight.schedule, tight.step_time, tight.peaks) == ("1f1b", 42.0, (18, 14, 10, 46))


def test_blocks_of_a_loop_are_recomputed_as_far_as_memory_asks_for_it() -> None:
    # Two blocks with 2 bytes of each of 4 micro-batches, and 2 bytes that stay, are 18.
    profile, given = _equal(), {"schedule": "looped", "micro_batches": 4}
    found = plan(profile, [16] * 4, recompute=True, **given)
    assert len(found.stages) == 8
    for device in range(4):
        assert sorted(found.saving[block] for block in found.blocks_on(device)) == ["keep", "recompute"]
    assert found.peaks == _walked(found)
    assert 33.0 < found.step_time < 44.0  # with nothing, and everything, recomputed
    with pytest.raises(InfeasiblePlanError):
        plan(profile, [16] * 4, recompute=False, **given)


def _random(rng: random.Random, blocks: int, batch_size: int) -> Profile:
    def bytes_of(most: int) -> list[int]:
        return [batch_size * rng.randint(0, most) for _ in range(blocks)]

    return Profile.from_costs(
        static=[rng.randint(1, 30) for _ in range(blocks)],
        saved=bytes_of(6),
        transient=bytes_of(4),
        transfer=bytes_of(3)[1:],
        forward_time=[batch_size * rng.uniform(0.5, 1.5) for _ in range(blocks)],
        backward_time=[batch_size * rng.uniform(1.0, 3.0) for _ in range(blocks)],
        together=[(0, blocks - 1)] if rng.random() < 0.2 else [],
        batch_size=batch_size,
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_budget_is_exceeded_and_memory_is_that_of_a_walk_through_the_launches(seed: int) -> None:
    rng = random.Random(seed)
    blocks, micro_batches, devices = rng.randint(4, 12), rng.randint(1, 6), rng.randint(2, 4)
    profile = _random(rng, blocks, micro_batches)
    total = sum(block.static + block.saved for block in profile.blocks)
    budgets = [round(total * rng.uniform(0.8, 2.0) / devices) for _ in range(devices)]
    policy = rng.choice(("auto", "auto", "balanced", "balanced_low_0", "sequential"))
    pin = {f"block{rng.randrange(blocks)}": rng.randrange(devices)} if rng.random() < 0.3 else {}
    given = {"schedule": "looped", "micro_batches": micro_batches, "policy": policy, "pin": pin, "cache": False}
    given["recompute"] = policy == "auto" and rng.random() < 0.5
    try:
        found = plan(profile, budgets, **given)
    except InfeasiblePlanError:
        # With one stage for each device and room enough everything fits; else budgets were too small.
        assert plan(profile, [4 * total] * devices, **given).fits
        return
    assert all(peak <= budget for peak, budget in zip(found.peaks, budgets, strict=True))
    assert found.peaks == _walked(found)
    assert [block for stage in found.stages for block in stage.blocks] == list(range(blocks))
    assert all(found.device_map[name] == device for name, device in pin.items())
    assert all(bound <= found.value * (1 + 1e-9) for bound in found.bounds.values())


@pytest.mark.parametrize("seed", range(8))
def test_of_all_ways_to_go_round_none_is_faster_by_more_than_may_be_given_for_memory(seed: int) -> None:
    rng = random.Random(seed)
    profile, devices = replace(_random(rng, 8, batch_size=4), together=()), rng.choice((2, 3))
    found = plan(profile, [10**6] * devices, schedule="looped", micro_batches=4, cache=False)
    part = profile.scaled(1)
    given = found.devices, crossings_of(part)
    least = float("inf")
    for cuts in (cuts for count in range(8) for cuts in combinations(range(1, 8), count)):
        stages = enumerate(pairwise((0, *cuts, 8)))
        places = [number % devices for number, (start, stop) in stages for _ in range(start, stop)]
        least = min(least, judge(part, places, places[-1], *given, schedule="looped", micro_batches=4).seconds)
    assert found.bounds["indivisible block"] <= least * (1 + 1e-9)
    assert found.step_time <= 1.02 * least * (1 + 1e-9)


def _two_chains() -> Profile:
    """Two chains of four blocks: 20 bytes stay in each block of the first, 4 in each of the second, and all pass on."""
    static = [20] * 4 + [4] * 4
    passed = [block for block in range(8) if block not in (3, 7)]
    owners, values, events = list(range(8)), [-1] * 8, list(range(1, 9))
    for value, block in enumerate(passed):
        for owner in (block, block + 1):  # the output, and its copy where it is taken
            owners.append(owner)
            values.append(value)
            events.append(len(owners))
    timeline = Timeline(
        sizes=(*static, *[1] * (len(owners) - 8)),
        owners=tuple(owners),
        values=tuple(values),
        events=tuple(events),
        marks=(("step 1 forward", 8),),
    )
    rows = tuple(BlockCost(f"block{block}", weights=size, forward_time=1.0) for block, size in enumerate(static))
    return Profile(rows, timeline, training=False)


def test_independent_chains_begin_at_the_first_device_each() -> None:
    found = plan(_two_chains(), [100] * 4, policy="balanced")
    # In call order one device holds 20 and all four small blocks, or two large ones: at least 36 bytes and copies.
    assert found.assignment == (0, 1, 2, 3, 0, 1, 2, 3)
    assert max(found.peaks) == 20 + 4 + 2 * 2
    assert found.schedule == "naive"
    assert not found.optimal
    assert "memory" not in found.bounds


def test_independent_chains_fit_where_no_cut_in_call_order_does() -> None:
    profile = _two_chains()
    in_order = combinations_with_replacement(range(4), 8)
    assert min(max(replay(profile.timeline, cut, cut[-1], 4)) for cut in in_order) > 28
    found = plan(profile, [28] * 4)
    assert (found.assignment, found.step_time) == ((0, 1, 2, 3) * 2, pytest.approx(8.0))
    assert found.fits
