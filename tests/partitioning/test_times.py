from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.devices.roofline import Rates, Work, seconds
from autobalance.partitioning.score import score
from autobalance.partitioning.stage import Stage
from autobalance.partitioning.times import (
    block_seconds,
    device_seconds,
    launch_seconds,
    optimizer_seconds,
    runs_of,
    stages_of,
    step_seconds,
)
from autobalance.partitioning.transfers import Crossing, crossings_of
from autobalance.profiling.block_cost import BlockCost
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT, Timeline

PROFILE = Profile.from_costs([1] * 3, forward_time=[1, 2, 3], backward_time=[2, 4, 6], transfer=[10, 20, 40])
DEVICES = [Device("fast", 1, flops=8.0, link=10.0), Device("slow", 1, flops=4.0, link=5.0)]
SAME = [Device("fast", 1, link=10.0), Device("far", 1, link=5.0)]


def worked(*works: tuple[tuple[Work, ...], tuple[Work, ...]], **fields: object) -> Profile:
    """A profile whose blocks do this work, forward and backward."""
    rows = tuple(
        BlockCost(f"block{k}", kind="A" if k % 2 else "B", forward_work=there, backward_work=back)
        for k, (there, back) in enumerate(works)
    )
    return Profile(rows, Timeline((), (), (), ()), **fields)  # type: ignore[arg-type] # whichever are given


def test_times_by_hand_hold_for_the_fastest_device_and_grow_with_its_lead() -> None:
    forward, backward = block_seconds(PROFILE, DEVICES[0], DEVICES)
    assert (forward.tolist(), backward.tolist()) == ([1, 2, 3], [2, 4, 6])
    forward, backward = block_seconds(PROFILE, DEVICES[1], DEVICES)
    assert (forward.tolist(), backward.tolist()) == ([2, 4, 6], [4, 8, 12])


def test_known_work_is_timed_at_the_rates_of_the_device() -> None:
    profile = worked(
        ((Work("bfloat16", 800, 10, 1), Work("", 0, 30, 2)), (Work("float32", 100, 400, 1),)),
        ((Work("bfloat16", 80, 10, 100),), ()),
    )
    device = Device("d", 1, 10.0, 20.0, rates=(("float32", 10.0), ("bfloat16", 40.0)), launch_time=0.5)
    forward, backward = block_seconds(profile, device, [device, DEVICES[0]])
    # 800 / 40 and 30 / 20 one after the other; 100 launches of half a second are slower than 80 / 40.
    assert forward.tolist() == [21.5, 50.0]
    assert backward.tolist() == [20.0, 0.0]  # 400 bytes / 20 are slower than 100 / 10
    slow = replace(device, efficiency=(("B", 0.25),))
    assert block_seconds(profile, slow, [slow])[0].tolist() == [4 * 20 + 1.5, 50.0]


def test_all_blocks_at_once_take_what_each_takes_by_itself() -> None:
    rates = {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12}
    works = [
        (
            (Work("bfloat16", 10**k, 10**9, k), Work("float64", 10**9, 7, 1), Work("", 0, 10**k, 3)),
            (Work("tf32", 3 * 10**k, 10**8, 2),) * (k % 3),
        )
        for k in range(14)
    ]
    forward, backward = block_seconds(worked(*works), Device("any", 1), [Device("any", 1)])
    assert forward.tolist() == pytest.approx([seconds(there, Rates(rates, 1555e9)) for there, _ in works])
    assert backward.tolist() == pytest.approx([seconds(back, Rates(rates, 1555e9)) for _, back in works])


def test_devices_of_one_speed_share_their_columns() -> None:
    times = device_seconds(PROFILE, [Device("a", 1), DEVICES[0], Device("b", 2)])
    assert times[0] is times[2]
    assert times[0] is not times[1]


def test_the_host_launches_the_kernels_of_all_devices() -> None:
    profile = worked(((Work("", 0, 1, 30),), (Work("", 0, 1, 50),)), ((), (Work("float32", 1, 1, 20),)))
    assert launch_seconds(profile) == pytest.approx(100 * 5e-6)
    assert launch_seconds(profile, [Device("a", 1), Device("b", 1, launch_time=1e-5)]) == pytest.approx(100 * 1e-5)


def test_the_optimizer_is_as_fast_as_the_memory() -> None:
    rows = tuple(replace(row, optimizer_time=k + 1.0) for k, row in enumerate(PROFILE.blocks))
    devices = [Device("fast", 1, bandwidth=20.0), Device("slow", 1, bandwidth=5.0)]
    assert optimizer_seconds(replace(PROFILE, blocks=rows), [0, 0, 1], devices) == (3.0, 12.0)
    traced = replace(PROFILE, blocks=rows, target="A100-80GB")  # 2039 GB/s
    devices = [Device("half", 1, bandwidth=2039e9 / 2), Device("same", 1, bandwidth=2039e9)]
    assert optimizer_seconds(traced, [0, 0, 1], devices) == pytest.approx((6.0, 3.0))


def test_a_stage_is_a_run_of_blocks_with_one_device() -> None:
    assert runs_of([0, 0, 1, 0]) == ((0, 2, 0), (2, 3, 1), (3, 4, 0))
    stages = stages_of(PROFILE, [1, 0, 0], 0, SAME, crossings_of(PROFILE), in_flight=[2, 1])
    assert [(stage.start, stage.stop, stage.device, stage.in_flight) for stage in stages] == [
        (0, 1, 1, 2),
        (1, 3, 0, 1),
    ]
    assert [(stage.forward_time, stage.backward_time) for stage in stages] == [(1, 2), (5, 10)]


def test_a_cut_adds_its_bytes_over_the_slower_link_both_ways() -> None:
    first, second = stages_of(PROFILE, [0, 1, 1], 1, SAME, crossings_of(PROFILE))
    assert (first.received, second.received) == (0, 2 * 10)
    assert (first.receive_time, second.receive_time) == (0, 2 * 10 / 5)
    (one,) = stages_of(PROFILE, [0, 0, 0], 0, SAME, crossings_of(PROFILE))
    assert one.receive_time == 0


def test_the_output_travels_to_a_root_elsewhere_and_counts_with_its_sender() -> None:
    (stage,) = stages_of(PROFILE, [1, 1, 1], 0, SAME, crossings_of(PROFILE))
    assert (stage.received, stage.receive_time) == (2 * 40, 2 * 40 / 5)


def test_without_training_nothing_comes_back() -> None:
    profile = replace(PROFILE, training=False)
    assert stages_of(profile, [0, 1, 1], 1, SAME, crossings_of(profile))[1].receive_time == 10 / 5


def test_a_tensor_goes_to_each_device_once_and_over_its_own_link() -> None:
    devices = [Device("a", 1, link=10.0), Device("b", 1, link=5.0), Device("c", 1, node=1, network=2.0)]
    crossings = [
        Crossing(0, (1, 2, 3), 30, has_gradient=True),  # b takes it twice, c once
        Crossing(ROOT, (0, 3), 6, has_gradient=False),  # the batch lies on c already
        Crossing(0, (ROOT, 3), 8, has_gradient=True),  # c's copy counts with the last stage, where the root is
    ]
    profile = Profile.from_costs([1] * 4)
    stages = stages_of(profile, [0, 1, 1, 2], 2, devices, crossings)
    assert [stage.received for stage in stages] == [6, 2 * 30, 2 * 30 + 2 * 8]
    assert [stage.receive_time for stage in stages] == [6 / 2, 60 / 5, 60 / 2 + 16 / 2]


def test_what_a_root_that_is_not_with_the_last_stage_takes_counts_with_who_sends_it() -> None:
    devices = [Device("a", 1, link=10.0), Device("b", 1, link=5.0)]
    crossings = [Crossing(0, (ROOT,), 30, has_gradient=False), Crossing(1, (ROOT,), 20, has_gradient=False)]
    stages = stages_of(Profile.from_costs([1] * 2), [0, 1], 0, devices, crossings)
    assert [stage.received for stage in stages] == [0, 20]


def test_recomputed_blocks_run_forward_twice_and_copies_to_the_host_run_beside() -> None:
    profile = Profile.from_costs([1] * 2, saved=[30, 80], forward_time=[1, 2], backward_time=[2, 4])
    device = Device("a", 1, host_link=10.0)
    (stage,) = stages_of(profile, [0, 0], 0, [device], (), saving=["recompute", "keep"])
    assert (stage.forward_time, stage.backward_time) == (3, 7)
    (stage,) = stages_of(profile, [0, 0], 0, [device], (), saving=["offload", "keep"])
    assert stage.time == 9  # 2 * 30 / 10 pass meanwhile
    (stage,) = stages_of(profile, [0, 0], 0, [device], (), saving=["keep", "offload"])
    assert stage.time == 16  # 2 * 80 / 10 take longer than 9


def test_a_step_is_all_stages_and_the_longest_for_each_further_micro_batch() -> None:
    stages = [
        Stage(0, 1, 0, forward_time=1.0, backward_time=2.0),
        Stage(1, 2, 1, forward_time=2.0, backward_time=3.0, receive_time=1.0),
    ]
    assert step_seconds(stages) == 3 + 6
    assert step_seconds(stages, 4) == 3 + 6 + 3 * 6
    assert step_seconds(stages, 4, launch=8.0) == 32  # the host is slower


def test_stages_know_where_in_their_forward_the_host_waits() -> None:
    profile = replace(PROFILE, waits=(ROOT, 1))
    forward, _ = block_seconds(profile, SAME[0], SAME)
    first, second = stages_of(profile, [0, 1, 1], 1, SAME, crossings_of(profile))
    assert first.holds == ((1, 0.0),)
    assert second.holds == ((1, float(forward[1])),)
    (alone,) = stages_of(profile, [0, 0, 0], 0, SAME, crossings_of(profile))
    assert alone.holds == ((0, 0.0), (0, float(forward[0] + forward[1])))


def test_waits_of_the_host_count_for_micro_batches_only() -> None:
    plain = Profile.from_costs([1, 1, 1], forward_time=[1, 1, 1], backward_time=[2, 2, 2], batch_size=8)
    waiting = replace(plain, waits=(0,))
    for micro_batches, schedule, is_slower in ((1, "naive", False), (4, "1f1b", True)):
        free, held = (
            score(profile, [0, 1, 2], [100] * 3, micro_batches=micro_batches, schedule=schedule).step_time
            for profile in (plain, waiting)
        )
        assert (held > free) == is_slower


def test_stages_know_how_long_the_host_launches_them() -> None:
    block = (Work("", 0, 1, 3), Work("float32", 8, 1, 1)), (Work("", 0, 1, 10),)
    profile = worked(block, block, block)
    device = replace(SAME[0], launch_time=0.5)
    first, second = stages_of(profile, [0, 1, 1], 0, [device, device], (), saving=["keep", "recompute", "keep"])
    assert first.launching == (2.0, 5.0)
    assert second.launching == (4.0, 12.0)
