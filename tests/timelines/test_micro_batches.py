"""Several micro-batches told from one, against traces of several, and against hand-made sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks import find_blocks
from autobalance.kernels.present import target_of
from autobalance.partitioning.replay import replay
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.schedules.launches import Launch, launch_order
from autobalance.timelines.micro_batches import MicroBatches, interleaved
from tests.models import CASES, adamw, sgd
from tests.profiling.running import training_step

Stages = list[tuple[int, int]]


class Summed(PlainTrial):
    """Gradient accumulation of the sum of losses, not of their mean."""

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss


class Together(PlainTrial):
    """Micro-batches of one step: all in one graph, or with a backward each; forwards alone keep their results."""

    def __init__(self, order: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._order = order.split()

    def run(self, twin: nn.Module, batch: Batch, glue: Callable[[], Any], mark: Callable[[str], None]) -> None:
        made: dict[str, Any] = {}
        count = sum(word[0] == "F" for word in self._order)
        for number in (1, 2):
            moved = [self._moved(part) for part in parts_of(batch.data, count)]
            for parameter in twin.parameters():
                parameter.grad = None
            before, made = made, {}
            mark(f"step {number} forward")
            torch.autocast_increment_nesting()  # one context for all forwards
            for word in self._order:
                if word[0] == "F":
                    with torch.set_grad_enabled(self._training), glue(), self._precise():
                        made[word[1:]] = self._step(twin, moved[int(word[1:])])
                else:
                    if word == "B" or word == "B0":
                        mark(f"step {number} backward")
                    with glue():
                        torch.autograd.backward(list(made.values()) if word == "B" else made[word[1:]])
                if word == f"F{count - 1}":
                    torch.autocast_decrement_nesting()
                    torch.clear_autocast_cache()
                    before.clear()
            if self._training:
                mark(f"step {number} optimizer")
                self._update(twin)
            mark(f"step {number} end")


def parts_of(data: Any, count: int) -> list[Any]:
    """The batch in parts of equally many samples."""
    if isinstance(data, Tensor):
        return list(data.chunk(count))
    return list(zip(*(parts_of(item, count) for item in data), strict=True))


def traced(model: nn.Module, data: Any, trial: PlainTrial) -> Profile:
    batches = [Batch("train batch", "train", data)]
    return Profiler(model, find_blocks(model), trial, batches, target=target_of("cuda")).profile()


def random_stages(chance: random.Random, blocks: int) -> Stages:
    cuts = sorted(chance.sample(range(1, blocks), chance.randrange(blocks)))
    return list(zip([0, *cuts], [*cuts, blocks], strict=True))


def questions(blocks: int, seed: int, count: int = 10) -> Iterator[tuple[Stages, list[int], int]]:
    """Stages, an assignment and the number of its devices; blocks are anywhere, for replays do not mind."""
    chance = random.Random(seed)
    for _ in range(count):
        devices = chance.randint(1, 4)
        yield random_stages(chance, blocks), [chance.randrange(devices) for _ in range(blocks)], devices


@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [
        ("gpt", adamw, "32-true"),
        ("tied embedding", sgd, "bf16-mixed"),
        ("batch norm convnet", sgd, "32-true"),
        ("skip in glue", adamw, "bf16-mixed"),
        ("called twice", sgd, "32-true"),
        ("lstm", adamw, "bf16-mixed"),
    ],
)
def test_one_after_the_other_is_gradient_accumulation_to_the_byte(name: str, optimizer: Any, precision: str) -> None:
    case = CASES[name]
    data = case.batches(1)[0]
    one, many = (
        traced(case.make(nn.Module), data, Summed(optimizer, training_step, precision, accumulate=count))
        for count in (1, 3)
    )
    for stages, assignment, devices in questions(len(one.blocks), seed=1):
        order = launch_order("naive", len(stages), 3)
        found = interleaved(one.timeline, len(one.blocks), stages, order)
        for root in (0, devices):
            expected = replay(many.timeline, assignment, root, devices + 1)
            assert replay(found, assignment, root, devices + 1) == expected, (stages, assignment, root)


def traced_together(name: str, order: str, *args: Any, **options: Any) -> tuple[Profile, Profile]:
    """Profiles of one of four micro-batches, and of all four."""
    case = CASES[name]
    data = case.batches(1)[0]
    asked = (("F0 B" if "B" in order else "F0", parts_of(data, 4)[0]), (order, data))
    one, many = (
        traced(case.make(nn.Module).train("B" in order), part, Together(words, *args, **options))
        for words, part in asked
    )
    return one, many


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt", "32-true"), ("gpt", "bf16-mixed"), ("residuals across blocks", "bf16-mixed"), ("lstm", "bf16-mixed")],
)
def test_all_forwards_first_is_one_graph_of_all(name: str, precision: str) -> None:
    one, many = traced_together(name, "F0 F1 F2 F3 B", adamw, training_step, precision)
    for stages, assignment, devices in questions(len(one.blocks), seed=2):
        found = interleaved(one.timeline, len(one.blocks), stages, launch_order("gpipe", len(stages), 4))
        expected = replay(many.timeline, assignment, devices, devices + 1)
        told = replay(found, assignment, devices, devices + 1)
        assert told[:devices] == expected[:devices], (stages, assignment)
        # One backward of several losses begins with a gradient of each at once.
        assert 0 <= expected[devices] - told[devices] <= 3 * 512


@pytest.mark.parametrize(
    ("name", "precision"),
    [("tied embedding", "32-true"), ("gpt", "bf16-mixed"), ("skip in glue", "bf16-mixed"), ("lstm", "32-true")],
)
def test_overlapping_backwards_hold_what_a_trace_of_them_holds(name: str, precision: str) -> None:
    words = "F0 F1 B0 F2 B1 F3 B2 B3"
    one, many = traced_together(name, words, adamw, training_step, precision)
    for stages, assignment, devices in questions(len(one.blocks), seed=3):
        order = [
            Launch(stage if word[0] == "F" else len(stages) - 1 - stage, int(word[1]), word[0] == "B")
            for word in words.split()
            for stage in range(len(stages))
        ]
        found = interleaved(one.timeline, len(one.blocks), stages, order)
        for root in (0, devices):
            expected = replay(many.timeline, assignment, root, devices + 1)
            assert replay(found, assignment, root, devices + 1) == expected, (stages, assignment, root)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_without_backwards_the_batch_and_all_results_are_there_to_the_end(precision: str) -> None:
    def step(model: Any, batch: Any) -> Any:
        return model(batch[0])

    one, many = traced_together("batch norm convnet", "F0 F1 F2 F3", None, step, precision, training=False)
    for stages, assignment, devices in questions(len(one.blocks), seed=4):
        order = launch_order("1f1b", len(stages), 4, training=False)
        found = interleaved(one.timeline, len(one.blocks), stages, order)
        expected = replay(many.timeline, assignment, devices - 1, devices)
        assert replay(found, assignment, devices - 1, devices) == expected


def by_hand(profile: Profile, stages: Stages, order: Sequence[Launch], device_of: Sequence[int]) -> list[int]:
    """Peaks of the textbook's step: static bytes, then what each launch takes and gives back."""
    devices = max(device_of) + 1
    held = [0] * devices
    for block, row in enumerate(profile.blocks):
        held[device_of[block]] += row.weights
    peaks = list(held)
    for launch in order:
        blocks = range(*stages[launch.stage])
        for block in reversed(blocks) if launch.backward else blocks:
            row, device = profile.blocks[block], device_of[block]
            peaks[device] = max(peaks[device], held[device] + row.forward_transient)
            held[device] += -row.saved if launch.backward else row.saved
            peaks[device] = max(peaks[device], held[device])
    assert held == [
        sum(row.weights for block, row in enumerate(profile.blocks) if device_of[block] == device)
        for device in range(devices)
    ]
    return peaks


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "looped"])
def test_textbook_steps_hold_what_launches_take(schedule: str) -> None:
    chance = random.Random(4)
    for _ in range(25):
        blocks = chance.randint(1, 8)
        columns = [[chance.randint(0, 9) for _ in range(blocks)] for _ in range(3)]
        profile = Profile.from_costs(*columns)
        stages = random_stages(chance, blocks)
        of_stage = [chance.randrange(len(stages)) for _ in stages]
        device_of = [of_stage[stage] for stage, (start, stop) in enumerate(stages) for _ in range(start, stop)]
        order = launch_order(schedule, len(stages), chance.randint(1, 6), devices=of_stage)
        found = interleaved(profile.timeline, blocks, stages, order)
        assert replay(found, device_of, 0, max(device_of) + 1) == by_hand(profile, stages, order, device_of)


def test_1f1b_holds_saved_bytes_once_for_each_micro_batch_in_flight() -> None:
    profile = Profile.from_costs(static=[100, 100, 100], saved=[7, 7, 7])
    order = launch_order("1f1b", 3, 8)
    found = interleaved(profile.timeline, 3, [(0, 1), (1, 2), (2, 3)], order)
    assert replay(found, [0, 1, 2], 2, 3) == [121, 114, 107]
    assert found.marks == (("step 1 forward", 3), ("step 1 backward", 3 + 3 * 6))


# Storages: weight, batch, activation, gradient. Of the two steps only the first has the weight's birth.
STEP = Timeline(
    sizes=(100, 8, 16, 50, 8, 16, 50),
    owners=(0, ROOT, 0, 0, ROOT, 0, 0),
    values=(-1,) * 7,
    events=(1, 2, 3, 4, -3, 5, -2, -4, 6, 7, -6, -5, -7),
    marks=(
        ("step 1 forward", 2), ("step 1 backward", 3), ("step 1 end", 5),
        ("step 2 forward", 8), ("step 2 backward", 9), ("step 2 end", 11),
    ),
)  # fmt: skip


def test_overlapping_micro_batches_are_parts_of_one_batch() -> None:
    overlapping = interleaved(STEP, 1, [(0, 1)], launch_order("gpipe", 1, 3))
    # The second gradient is there beside the first, while two activations still are.
    assert replay(overlapping, [0], 1, 2) == [100 + 2 * 16 + 2 * 50, 6 * 8]
    in_turn = interleaved(STEP, 1, [(0, 1)], launch_order("naive", 1, 3))
    assert replay(in_turn, [0], 1, 2) == [100 + 16 + 2 * 50, 2 * 8]


def test_the_gradient_that_stays_is_the_first_that_is_made() -> None:
    found = interleaved(STEP, 1, [(0, 1)], launch_order("gpipe", 1, 3))
    births = [event for event in found.events if event > 0 and found.sizes[event - 1] == 50]
    assert births[0] == STEP.events[3]
    assert found.events.count(-births[0]) == 1
    assert found.events.index(-births[0]) > max(found.events.index(-birth) for birth in births[1:3])


def test_copies_of_what_all_share_are_shared_too() -> None:
    # Block 1 is given block 0's weight: a copy, which each micro-batch has, of what there is once.
    shared = Timeline(
        (64, 64, 4), (0, 1, 1), (0, 0, -1), (1, 2, 3, -3, -2), (("step 1 forward", 1), ("step 1 backward", 3))
    )
    found = interleaved(shared, 2, [(0, 2)], launch_order("gpipe", 1, 4))
    assert replay(found, [0, 1], 1, 2) == [64, 64 + 4 * 4]
    assert replay(found, [0, 0], 0, 1) == [64 + 4 * 4]


def test_columns_of_bytes_go_with_their_storages() -> None:
    sized = Timeline(
        (8, 4), (0, 0), (-1, -1), (1, 2, -2), (("step 1 forward", 1), ("step 1 backward", 2)), (8, 0), (0, 2), (1,)
    )
    found = interleaved(sized, 1, [(0, 1)], launch_order("gpipe", 1, 3))
    assert (found.sizes, found.fixed, found.per_sample) == ((8, 4, 4, 4), (8, 0, 0, 0), (0, 2, 2, 2))
    assert found.scratch == (1, 2, 3)
    assert replay(found.scaled(5, granule=1), [0], 0, 1) == [8 + 3 * 10]


def test_one_micro_batch_is_the_timeline_itself() -> None:
    assert interleaved(STEP, 1, [(0, 1)], launch_order("1f1b", 1, 1)) is STEP


def test_stages_and_counts_can_be_asked_for_again_and_again() -> None:
    profile = Profile.from_costs([1, 2, 3], [4, 5, 6], [7, 8, 9])
    many = MicroBatches(profile.timeline, 3)
    for stages in ([(0, 1), (1, 3)], [(0, 2), (2, 3)]):
        for count in (2, 5):
            order = launch_order("1f1b", 2, count)
            assert many.interleaved(stages, order) == interleaved(profile.timeline, 3, stages, order)


def test_what_does_not_fit_is_refused() -> None:
    order = launch_order("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"stages=\[\(0, 1\), \(2, 3\)\] are not the 3 blocks in call order"):
        interleaved(Profile.from_costs([1] * 3).timeline, 3, [(0, 1), (2, 3)], order)
    with pytest.raises(ValueError, match="the order launches stage 1 of 1 stages"):
        interleaved(STEP, 1, [(0, 1)], order)
    two = Profile.from_costs([1, 1]).timeline
    with pytest.raises(
        ValueError, match="7 launches of 2 micro-batches in 2 stages: each micro-batch is to be launched"
    ):
        interleaved(two, 2, [(0, 1), (1, 2)], order[:-1])
    with pytest.raises(
        ValueError, match="no mark of the timeline says where a step's forward begins; its marks are: none"
    ):
        interleaved(Timeline((4, 4), (0, 1), (-1, -1), (1, 2)), 2, [(0, 1), (1, 2)], order)
    with pytest.raises(
        ValueError, match="the launch order has forwards alone, but a forward of the timeline has backwards"
    ):
        interleaved(two, 2, [(0, 1), (1, 2)], launch_order("1f1b", 2, 2, training=False))
