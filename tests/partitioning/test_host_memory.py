"""What plans keep in host memory, against a look at every way of small questions and walks through their steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import autobalance
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.judge import judge
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import Profile
from tests.partitioning.host_walk import (
    LINK,
    Row,
    Way,
    device_peak,
    device_seconds,
    host_bytes,
    profile_of,
    random_rows,
    stages_in,
    ways,
)


@pytest.mark.parametrize("seed", range(40))
def test_no_way_is_faster_than_the_plan_and_its_figures_are_those_of_a_walk(seed: int) -> None:
    rng = random.Random(seed)
    rows, micro_batches = random_rows(rng, 3), rng.choice((1, 1, 2, 4))
    static = sum(row.weights + row.gradients + row.state for row in rows)
    budgets = [max(1, round(static * rng.uniform(0.35, 1.1))) for _ in range(rng.choice((1, 2)))]
    schedule = "1f1b" if micro_batches > 1 else "naive"
    times, cases = {}, [[(device, 0, 3)] for device in range(len(budgets))]
    if len(budgets) > 1:
        cases += [[(one, 0, cut), (1 - one, cut, 3)] for one in (0, 1) for cut in (1, 2)]
    for case in cases:
        for number, (device, start, stop) in enumerate(case):
            here, held = rows[start:stop], min(micro_batches, len(case) - number)
            fitting = [way for way in ways(here) if device_peak(here, way, held) <= budgets[device]]
            found = [device_seconds(here, way, micro_batches, len(budgets)) for way in fitting]
            times[len(case), device, start] = min(found, default=float("inf"))
    least = min(
        sum(stages) + (micro_batches - 1) * max(stages) if max(stages) < float("inf") else float("inf")
        for stages in ([times[len(case), device, start] for device, start, _ in case] for case in cases)
    )
    devices = [Device(f"gpu {at}", budget, host_link=LINK) for at, budget in enumerate(budgets)]
    try:
        plan = autobalance.plan(
            profile_of(rows, micro_batches),
            devices,
            schedule=schedule,
            micro_batches=micro_batches,
            offload=True,
            recompute=False,
            cache=False,
        )
    except InfeasiblePlanError:
        assert least == float("inf")
        return
    assert plan.value <= least * (1.02 + 1e-9)
    stages = stages_in(plan, rows)
    held = [min(micro_batches, len(stages) - number) for number in range(len(stages))]
    seconds = [device_seconds(here, way, micro_batches, len(devices)) for _, here, way in stages]
    assert plan.value == pytest.approx(sum(seconds) + (micro_batches - 1) * max(seconds))
    plain = [device_seconds(here, replace(way, host_optimizer=False), 1, 1) for _, here, way in stages]
    assert plan.step_time == pytest.approx(sum(plain) + (micro_batches - 1) * max(plain))
    for (device, here, way), count in zip(stages, held, strict=True):
        assert plan.peaks[device] == device_peak(here, way, count) <= budgets[device]
        if way.host_optimizer or any(way.offloads) or any(way.streams):
            keeping = Way(False, (False,) * len(here), (False,) * len(here))
            assert device_peak(here, keeping, count) > budgets[device], "nothing is saved that fits as it is"


def test_an_optimizer_goes_to_the_host_where_that_is_cheaper_than_streaming() -> None:
    rows = [Row(10, 10, 20)] * 4
    plan = autobalance.plan(profile_of(rows), [Device("gpu", 100, host_link=LINK)], offload=True)
    # 80 bytes of weights and gradients stay; gradients go down and weights come up once, 40 bytes each way.
    assert (plan.host_optimizer, plan.streamed, plan.saving, plan.peaks) == ((0,), (), (), (80,))
    assert plan.step_time == 4.0
    assert plan.value == pytest.approx(4.0 + 80 / LINK)
    assert plan.notes[-1] == (
        "the optimizer of device 0 runs on the host, which takes about 4 s once per step, apart from the step time"
    )


def test_nothing_leaves_the_devices_where_that_is_not_allowed_or_not_needed() -> None:
    rows = [Row(10, 10, 20, saved=4)] * 4
    fits = autobalance.plan(profile_of(rows), [180], offload=True)
    assert (fits.host_optimizer, fits.streamed, fits.saving) == ((), (), ())
    with pytest.raises(InfeasiblePlanError, match=r"offload=True: .* the optimizer of 1 device is on the host"):
        autobalance.plan(profile_of(rows), [Device("gpu", 100, host_link=LINK)])


def test_plans_that_take_as_long_copy_as_little_as_they_can() -> None:
    rows = [Row(10, saved=2, transient=1, seconds=3.0)] * 8

    def devices(budget: int) -> list[Device]:
        return [Device(f"gpu {at}", budget, host_link=LINK) for at in (0, 1)]

    # On one device all weights could stream beside the computation, and nothing would be slower.
    roomy = autobalance.plan(profile_of(rows), devices(60), offload=True)
    assert (sorted(roomy.peaks), roomy.streamed, roomy.saving) == ([49, 49], (), ())
    # Weights of 80 bytes and two times 30: two blocks stay, the others stream through two slots.
    tight = autobalance.plan(profile_of(rows), devices(30), offload=True)
    assert (len(tight.streamed), tight.saving.count("offload"), tight.step_time) == (6, 2, 24.0)


@pytest.mark.parametrize("seed", range(25))
def test_all_devices_together_keep_within_the_memory_of_the_host(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, 6)
    static = sum(row.weights + row.gradients + row.state for row in rows)
    devices = [Device(f"gpu {at}", max(24, round(static * 0.3)), host_link=LINK) for at in range(2)]
    free = _plan_within(rows, devices, 2**40)
    if free is None:
        return
    taken = sum(host_bytes(here, way, 1) for _, here, way in stages_in(free, rows))
    assert not taken or _plan_within(rows, devices, taken) is not None
    for share in (0.9, 0.7, 0.5):
        plan = _plan_within(rows, devices, int(share * taken))
        if plan is not None:
            assert sum(host_bytes(here, way, 1) for _, here, way in stages_in(plan, rows)) <= share * taken
            assert plan.fits
            assert plan.value >= free.value / 1.02


def _plan_within(rows: Sequence[Row], devices: Sequence[Device], host: int) -> Plan | None:
    try:
        return autobalance.plan(
            profile_of(rows), devices, offload=True, recompute=False, max_memory={"cpu": host}, cache=False
        )
    except InfeasiblePlanError:
        return None


def test_host_memory_that_is_missing_is_said() -> None:
    rows = [Row(10, saved=2, transient=1, seconds=3.0)] * 8
    devices = [Device(f"gpu {at}", 30, host_link=LINK) for at in (0, 1)]
    # Six blocks in 16 bytes each, and twice the 2 bytes that two of them save.
    assert autobalance.plan(profile_of(rows), devices, offload=True, max_memory={"cpu": 100}).fits
    with pytest.raises(InfeasiblePlanError) as caught:
        autobalance.plan(profile_of(rows), devices, offload=True, max_memory={"cpu": 90})
    text = str(caught.value)
    assert text.startswith("no plan was found that fits the devices and the host's memory.")
    assert "more host memory: 100 B would do, 90 B may be used, 10 B missing (max_memory={'cpu': 100})" in text


@pytest.mark.parametrize("seed", range(20))
def test_weights_that_stream_are_on_the_device_a_block_ahead_and_no_more(seed: int) -> None:
    rng = random.Random(seed)
    alike = seed % 2
    rows = [replace(row, state=0) for row in random_rows(rng, 5)]
    rows = [replace(rows[0], gradients=rows[0].gradients)] * 5 if alike else rows
    streams = tuple(bool(alike) or rng.random() < 0.6 for _ in rows)
    schedule, micro_batches = rng.choice((("naive", 1), ("gpipe", 3)))
    profile = profile_of(rows, micro_batches).scaled(1)
    judged = judge(
        profile,
        [0] * 5,
        0,
        [Device("gpu", 1, host_link=LINK)],
        crossings_of(profile),
        schedule=schedule,
        micro_batches=micro_batches,
        streamed=[block for block, goes in enumerate(streams) if goes],
    )
    said, simulated = judged.peaks[0], _simulated(rows, streams, micro_batches)
    # What is largest may come at another time than what is staged most.
    assert said == simulated if alike else said >= simulated
    way = Way(False, (False,) * 5, streams)
    assert judged.stages[0].time == pytest.approx(device_seconds(rows, way, micro_batches, 1))


def _simulated(rows: Sequence[Row], streams: Sequence[bool], micro_batches: int) -> int:
    """All forwards, then all backwards, with two slots: for the block that streams now and the next of its pass."""
    held = sum(row.weights + row.gradients for row, goes in zip(rows, streams, strict=True) if not goes)
    peak, count = 0, len(rows)
    for each in "f" * micro_batches + "b" * micro_batches:
        order = list(range(count)) if each == "f" else list(reversed(range(count)))
        for number, block in enumerate(order):
            ahead = next((later for later in order[number + 1 :] if streams[later]), None)
            inside = [block] * streams[block] + ([ahead] if ahead is not None else [])
            slots = sum(rows[at].weights + rows[at].gradients for at in inside)
            row = rows[block]
            peak = max(peak, held + slots + row.transient, held + slots + (row.saved if each == "f" else 0))
            held += row.saved if each == "f" else -row.saved
    return peak


def _traced(frozen: int) -> Profile:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(6)))
    for block in model[:frozen]:
        block.requires_grad_(False)
    return autobalance.profile(model, torch.zeros(512, 64), optimizer=torch.optim.AdamW, target="cpu")


def test_a_traced_model_whose_weights_alone_are_too_many_streams_its_frozen_blocks() -> None:
    profile = _traced(frozen=5)
    whole = autobalance.plan(profile, [2**30])
    weights = [block.weights for block in profile.blocks]
    budget = whole.peaks[0] - sum(weights[:5]) + 2 * weights[0]
    with pytest.raises(InfeasiblePlanError, match=r"offload=True: .* the weights of 5 blocks stream from the host"):
        autobalance.plan(profile, [Device("gpu", budget, host_link=25e9)])
    plan = autobalance.plan(profile, [Device("gpu", budget, host_link=25e9)], offload=True)
    assert (plan.streamed, plan.peaks) == ((0, 1, 2, 3, 4), (budget,))
    # They are read in the forward and in the backward, and nothing goes back.
    assert plan.stages[0].time >= 2 * sum(weights[:5]) / 25e9


def test_gradients_that_are_not_there_at_the_peak_make_no_room_when_they_leave() -> None:
    profile = _traced(frozen=0)
    whole = autobalance.plan(profile, [2**30])
    judged = judge(
        profile,
        [0] * 6,
        0,
        [Device("gpu", 2**30)],
        crossings_of(profile),
        streamed=range(6),
        host_optimizer=[0],
    )
    homes = profile.timeline.homes([0] * 6, 0)
    at, used = profile.timeline.usage(homes, 1)[0]
    peak = int(at[used.argmax()])
    alive = {abs(event) - 1 for event in profile.timeline.events[:peak]} - {
        -event - 1 for event in profile.timeline.events[:peak] if event < 0
    }
    size = profile.blocks[0].weights
    # Of the size of weights, at most: weights, gradients, two of state. Fewer are alive when activations are highest.
    there = sum(profile.timeline.sizes[storage] == size for storage in alive)
    assert there < 4 * 6
    assert judged.peaks[0] <= whole.peaks[0]
    assert judged.peaks[0] >= int(used.max()) - there * size + 4 * size


def test_of_plans_that_fill_a_device_the_one_that_copies_less_is_taken() -> None:
    # A whole batch of eight holds 128 bytes of saved tensors beside 80 that stay; one of its samples 16 at a time.
    rows = [Row(10, saved=2, transient=1)] * 8
    devices = [Device("gpu", 100, host_link=LINK)]
    plan = autobalance.plan(
        profile_of(rows, 8),
        devices,
        policy="sequential",
        schedule=("naive", "1f1b"),
        micro_batches=(1, 8),
        offload=True,
    )
    assert (plan.schedule, plan.saving, plan.streamed, plan.peaks) == ("1f1b", (), (), (97,))
