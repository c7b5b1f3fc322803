"""Blocks that make what they have saved again, or have it on the host, against real checkpoints and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autobalance
from autobalance import Profile
from autobalance.partitioning.replay import replay
from autobalance.partitioning.savings.savings import saving_costs, stage_peak
from autobalance.profiling.timeline import Timeline
from autobalance.schedules.launches import in_flight, launch_order
from autobalance.timelines.calls import Call
from autobalance.timelines.micro_batches import interleaved
from autobalance.timelines.recompute import savable, with_savings
from tests.models import CASES

# Block 0 is given a tensor (0), makes a transient one (1), one that it saves (2) and its output (3), which block 1 is
# given as 4 and saves; back come gradients (5, 6).
EVENTS = (1, 2, 3, -2, 4, 5, -4, 6, -5, 7, -3, -6, -1, -7)
CALL = Call(block=0, start=1, stop=5, back=9, inputs=(0,), saved=(2,), until=(5,))
STEP = Timeline(
    sizes=(1, 2, 4, 8, 8, 16, 32),
    owners=(0, 0, 0, 0, 1, 1, 0),
    values=(-1, -1, -1, 0, 0, -1, -1),
    events=EVENTS,
    marks=(("step 1 forward", 1), ("step 1 backward", 7), ("step 1 end", 14)),
    calls=(CALL,),
)


def test_saved_storages_die_with_the_forward_and_are_made_again_before_the_backward() -> None:
    less = with_savings(STEP, ["recompute", "keep"])
    # 2 dies when the forward is over; 7 and 8 are transient and saved ones again, and the output is not made again.
    assert less.events == (1, 2, 3, -2, 4, -3, 5, -4, 6, -5, 8, 9, -8, 7, -9, -6, -1, -7)
    assert (less.sizes[7:], less.owners[7:], less.values[7:]) == ((2, 4), (0, 0), (-1, -1))
    assert less.marks == (("step 1 forward", 1), ("step 1 backward", 8), ("step 1 end", 18))
    assert less.calls == ()


def test_inputs_stay_until_the_backward_is_through_where_it_makes_the_forward_again() -> None:
    early = Timeline(
        sizes=STEP.sizes,
        owners=STEP.owners,
        values=STEP.values,
        events=(1, 2, 3, -2, -1, 4, 5, -4, 6, -5, 7, -3, -6, -7),
        calls=(Call(block=0, start=1, stop=6, back=10, inputs=(0,), saved=(2,), until=(6,)),),
    )
    assert with_savings(early, ["recompute", "keep"]).events[-5:] == (7, -9, -1, -6, -7)


def test_what_others_use_as_well_stays_and_is_made_again_beside() -> None:
    shared = Timeline(
        sizes=STEP.sizes,
        owners=STEP.owners,
        values=STEP.values,
        events=EVENTS,
        calls=(Call(block=0, start=1, stop=5, back=9, inputs=(0,), saved=(2,), until=(10,)),),
    )
    assert with_savings(shared, ["recompute", "keep"]).events == (
        *(1, 2, 3, -2, 4, 5, -4, 6, -5),
        *(8, 9, -8),
        *(7, -3, -9, -6, -1, -7),
    )


def test_offloaded_storages_and_inputs_are_away_between_forward_and_backward() -> None:
    less = with_savings(STEP, ["offload", "keep"])
    assert less.events == (1, 2, 3, -2, 4, -3, -1, 5, -4, 6, -5, 8, 9, 7, -8, -6, -9, -7)
    assert less.sizes[7:] == (4, 1)


def test_what_cannot_be_done_is_said() -> None:
    assert savable(STEP) == {0}
    with pytest.raises(
        ValueError, match="block 1 is to offload what it saves, but the trace has no forward of it whose"
    ):
        with_savings(STEP, ["keep", "offload"])
    with pytest.raises(ValueError, match="saving has 'drop'; choose among 'keep', 'recompute', 'offload'"):
        with_savings(STEP, ["keep", "drop"])
    assert with_savings(STEP, ["keep", "keep"]) is STEP


@pytest.mark.parametrize("change", [{"saved": (7,)}, {"back": 3}, {"until": ()}, {"until": (15,)}])
def test_a_call_that_speaks_of_what_is_not_there_is_refused(change: dict[str, Any]) -> None:
    fields = {"block": 0, "start": 1, "stop": 5, "back": 9, "saved": (2,), "until": (5,), **change}
    with pytest.raises(ValueError, match="a call "):
        Timeline(STEP.sizes, STEP.owners, STEP.values, EVENTS, calls=(Call(**fields),))


@pytest.mark.parametrize("seed", range(30))
def test_textbook_stages_peak_as_the_knapsack_says(seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(2, 6)

    def column(least: int) -> list[int]:
        return [draw.randint(least, 20) for _ in range(blocks)]

    saved = column(5)
    transfer = [draw.randint(0, size) for size in saved[1:]]
    profile = Profile.from_costs(column(1), saved, column(0), transfer=transfer)
    words = [draw.choice(["keep", "recompute", "offload"]) for _ in range(blocks)]
    cut = draw.randint(1, blocks - 1)
    schedule, count = draw.choice(["gpipe", "1f1b"]), draw.randint(2, 5)
    order = launch_order(schedule, 2, count)
    step = interleaved(with_savings(profile.timeline, words), blocks, [(0, cut), (cut, blocks)], order)
    costs = saving_costs(profile.blocks, [0.0] * blocks, offload=True)
    flights = in_flight(order, 2)
    assert replay(step, [0] * cut + [1] * (blocks - cut), 1, 2) == [
        stage_peak(costs, 0, words[:cut], in_flight=flights[0]),
        stage_peak(costs, cut, words[cut:], in_flight=flights[1]),
    ]


def again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False)


def loss(model: Any, batch: Any) -> Any:
    return model.training_step(batch, 0)


def profiled(case: str, recomputed: list[str]) -> Profile:
    model = CASES[case].make()
    for name in recomputed:
        module = model.get_submodule(name)
        module.forward = again(module.forward)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return autobalance.profile(model, CASES[case].batches()[0], optimizer=optimizer, step=loss, target="simulated")


@pytest.mark.parametrize("case", ["gpt", "batch norm convnet", "lstm"])
def test_peaks_are_those_of_real_checkpoints(case: str) -> None:
    draw = random.Random(0)
    plain = profiled(case, [])
    can = savable(plain.timeline)
    assert can
    some = sorted(can)[:2]
    words = ["recompute" if block in some else "keep" for block in range(len(plain.blocks))]
    truth = profiled(case, [plain.names[block] for block in some])
    less = with_savings(plain.timeline, words)
    for devices in (1, 2, 2, 3, 3, 3):
        assignment = [draw.randrange(devices) for _ in words]
        root = assignment[-1]
        assert replay(less, assignment, root, devices) == replay(truth.timeline, assignment, root, devices)
