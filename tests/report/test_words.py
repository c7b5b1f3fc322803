from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.stage import Stage
from autobalance.report.words import bubble, fit_line, schedule_line, visits_line, visits_of, waterfall_line

GIB = 2**30


def test_the_bubble_is_what_equal_stages_are_known_to_leave(pipelined: Plan) -> None:
    # Equal stages stand still (K - 1) / (m + K - 1) of the time (GPipe, section 2.3): here 3 / 11.
    stage = pipelined.stages[0]
    stages = tuple(replace(stage, device=device) for device in range(4))
    step = (4 + 8 - 1) * stage.time
    assert bubble(replace(pipelined, stages=stages, micro_batches=8, step_time=step)) == pytest.approx(3 / 11)


def test_the_schedule_is_told_with_its_micro_batches(pipelined: Plan) -> None:
    # Each device works for 2 x (0.3 + 0.35) / 2 s of 1 s.
    assert schedule_line(pipelined) == "predicted step 1.00 s: 1f1b, 2 micro-batches of 2 samples, bubble 35%"
    uneven = replace(pipelined, micro_batches=3)
    assert "3 micro-batches of at most 2 samples" in schedule_line(uneven)
    assert "2 micro-batches, bubble" in schedule_line(replace(pipelined, profile=None))
    untimed = replace(pipelined, step_time=0.0, micro_batches=1, schedule="naive")
    assert schedule_line(untimed) == "schedule: naive, one device at a time; the profile has no times"


def test_the_waterfall_ends_in_the_optimum_or_in_the_gap(pipelined: Plan) -> None:
    bounds = "step time: area 900 ms → indivisible block 900 ms → transfers 950 ms → memory 1.00 s"
    assert waterfall_line(pipelined) == f"{bounds} = optimal"
    worse = replace(pipelined, value=1.05, optimal=False)
    assert waterfall_line(worse) == f"{bounds}; this plan 1.05 s, at most 5.0% above the least possible"
    unproved = replace(pipelined, value=1.0002, optimal=False)
    assert waterfall_line(unproved).endswith("this plan 1.00 s, less than 0.1% above the least possible")
    roomier = replace(pipelined, value=1.01)
    assert waterfall_line(roomier).endswith("this plan 1.01 s, within 1.0% of the least, for more room in memory")
    packed = replace(pipelined, objective="largest use", value=0.5, bounds={"area": 0.25, "memory": 0.5})
    assert waterfall_line(packed) == "largest use: area 25.0% → memory 50.0% = optimal"


def test_where_it_is_tight_is_told(pipelined: Plan) -> None:
    assert fit_line(pipelined) == "fits: largest use 78.1% on device 0"
    over = replace(pipelined, budgets=(12 * GIB, 16 * GIB))
    assert fit_line(over) == "does not fit: over the budget are device 0 by 512.00 MiB"


def test_a_plan_that_tells_no_stages_has_one_for_each_run_of_blocks(pipelined: Plan) -> None:
    stages = visits_of(replace(pipelined, stages=(), assignment=(0, 1, 1, 0)))
    assert [(stage.start, stage.stop, stage.device) for stage in stages] == [(0, 1, 0), (1, 3, 1), (3, 4, 0)]


def test_the_optimizer_on_the_host_is_said_where_the_value_has_its_step(pipelined: Plan) -> None:
    hosted = replace(pipelined, value=1.05, bounds={"memory": 1.05}, host_optimizer=(1,))
    assert waterfall_line(hosted) == "step time: memory 1.05 s = optimal with the optimizer's step on the host"
    worse = replace(hosted, value=1.26, optimal=False)
    assert "this plan 1.26 s with the optimizer's step on the host, at most 20.0% above" in waterfall_line(worse)
    packed = replace(worse, objective="largest use", value=0.5, bounds={"memory": 0.25})
    assert "optimizer" not in waterfall_line(packed)


def test_devices_that_are_visited_again_are_named(pipelined: Plan) -> None:
    stages = tuple(Stage(block, block + 1, device) for block, device in enumerate((0, 1, 2, 0)))
    looped = replace(pipelined, schedule="looped", stages=stages)
    assert visits_line(looped) == "device 0 is visited more than once: a forward runs on devices 0 → 1 → 2 → 0"
    assert visits_line(pipelined) == ""
