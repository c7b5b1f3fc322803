from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.judge import Judged, judge
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import Profile

DEVICES = [Device("a", 1, link=10.0, host_link=4.0), Device("b", 1, link=5.0, host_link=4.0)]
PROFILE = Profile.from_costs(
    [10, 20], saved=[4, 6], transient=[3, 3], transfer=[5], forward_time=[1, 2], backward_time=[2, 4], batch_size=1
)


def _judged(assignment: list[int], **options: object) -> Judged:
    return judge(PROFILE, assignment, assignment[-1], DEVICES, crossings_of(PROFILE), **options)  # type: ignore[arg-type]


def test_one_stage_after_the_other_takes_all_their_times() -> None:
    judged = _judged([0, 1])
    # Static bytes, what the forward saves, what the backward takes beside it; five bytes at five a second, both ways.
    assert judged.peaks == (10 + 4 + 3, 20 + 6 + 3)
    assert [stage.time for stage in judged.stages] == [3.0, 6.0 + 2.0]
    assert judged.seconds == 11.0
    assert [stage.in_flight for stage in judged.stages] == [1, 1]


def test_the_longest_stage_takes_its_time_once_more_for_each_further_micro_batch() -> None:
    judged = _judged([0, 1], schedule="1f1b", micro_batches=3)
    assert judged.seconds == 11.0 + 2 * 8.0
    assert [stage.in_flight for stage in judged.stages] == [2, 1]
    assert judged.peaks == (10 + 2 * 4 + 3, 20 + 6 + 3)
    gpipe = _judged([0, 1], schedule="gpipe", micro_batches=3)
    assert gpipe.peaks == (10 + 3 * 4 + 3, 20 + 3 * 6 + 3)


def test_a_block_that_runs_again_keeps_its_inputs_and_takes_its_forward_once_more() -> None:
    judged = _judged([0, 0], saving=["recompute", "keep"])
    # Block 1 runs beside nothing of block 0, whose input comes from nowhere; then block 0 saves again.
    assert judged.peaks == (30 + 6 + 3, 0)
    assert _judged([0, 0]).peaks == (30 + 4 + 6 + 3, 0)
    assert judged.seconds == 9.0 + 1.0


def test_what_goes_to_the_host_and_back_takes_time_where_there_is_nothing_else_to_do() -> None:
    judged = _judged([0, 0], saving=["offload", "keep"])
    assert judged.peaks == (30 + 6 + 3, 0)
    assert judged.seconds == 9.0, "eight bytes at four a second pass meanwhile"


def test_weights_that_stream_are_there_while_their_block_runs_or_is_next() -> None:
    everything = _judged([0, 0])
    # Twenty of thirty bytes leave the device and come back while they are needed; of both, both are there.
    assert _judged([0, 0], streamed=(0,)).peaks == everything.peaks
    assert _judged([0, 0], streamed=(0, 1)).peaks == everything.peaks
    three = Profile.from_costs([10, 20, 8])
    assert judge(three, [0] * 3, 0, DEVICES, (), streamed=(0, 1, 2)).peaks == (10 + 20, 0)
    assert judge(three, [0] * 3, 0, DEVICES, (), streamed=(0, 2)).peaks == (20 + 10 + 8, 0)


def test_stages_that_visit_a_device_twice_wait_for_one_another() -> None:
    profile = Profile.from_costs([1] * 4, forward_time=[1] * 4, backward_time=[1] * 4, batch_size=1)
    judged = judge(profile, [0, 1, 0, 1], 1, DEVICES, (), schedule="looped", micro_batches=2)
    # Two micro-batches go round both devices twice: forwards end after 5 s, backwards take as long.
    assert judged.seconds == pytest.approx(10.0)
    assert judged.peaks == (2, 2)
