"""Blocks that are called again on what they have made, or been given, before: by hand, and against real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.partitioning.replay import replay
from autobalance.profiling.timeline import Timeline
from autobalance.simulated import simulate
from autobalance.timelines.calls import Call
from autobalance.timelines.freed import freed_bytes
from autobalance.timelines.recompute import with_savings
from tests.execution.saving_runs import WIDTH, Case

# The block is given 0, and makes 1, which it saves and is given again; then it makes 2, which it saves as well. Its
# second backward makes the gradient 3 of 2, its first the gradient 4 of 1.
EVENTS = (1, 2, 3, 4, -3, 5, -2, -4, -1, -5)
FIRST = Call(block=0, start=1, stop=2, back=5, inputs=(0,), saved=(1,), until=(3,))
SECOND = Call(block=0, start=2, stop=3, back=3, inputs=(1,), saved=(2,), until=(3,))


def step_of(*calls: Call, events: tuple[int, ...] = EVENTS) -> Timeline:
    marks = ("step 1 forward", 1), ("step 1 backward", 3), ("step 1 end", len(events))
    return Timeline(
        sizes=(1, 2, 4, 8, 16),
        owners=(0,) * 5,
        values=(-1,) * 5,
        events=events,
        marks=marks,
        calls=calls,
    )


def test_what_both_backwards_use_is_sent_away_once_and_comes_back_for_each() -> None:
    less = with_savings(step_of(FIRST, replace(SECOND, borrowed=(1,))), ["offload"])
    # 5 and 6 are 1 again, for the second call and for the first; 7 is what the first was given, 8 is 2 again.
    assert less.sizes[5:] == (2, 2, 1, 4)
    assert less.events == (1, 2, -1, 3, -2, -3, 6, 9, 4, -9, -6, 7, 8, 5, -7, -4, -8, -5)


def test_what_only_its_maker_uses_in_the_backward_comes_back_for_that() -> None:
    less = with_savings(step_of(FIRST, SECOND), ["offload"])
    assert less.sizes[5:] == (2, 1, 4)
    assert less.events == (1, 2, -1, 3, -2, -3, 8, 4, -8, 6, 7, 5, -6, -4, -7, -5)


def test_what_is_given_to_the_block_again_stays_for_that_and_its_maker_makes_it_once_more() -> None:
    less = with_savings(step_of(FIRST, SECOND), ["recompute"])
    assert less.sizes[5:] == (2, 4)
    assert less.events == (1, 2, 3, -3, 7, 4, -7, -2, 6, 5, -6, -4, -1, -5)


def test_casts_that_another_call_has_made_are_made_again_by_each() -> None:
    cast = replace(SECOND, inputs=(), borrowed=(1,))
    assert with_savings(step_of(FIRST, cast), ["recompute"]).events == (
        *(1, 2, 3, -2, -3),
        *(8, 7, 4, -7, -8),
        *(6, 5, -6, -4, -1, -5),
    )


def test_what_is_given_twice_is_sent_away_after_the_second_call() -> None:
    twice = step_of(replace(FIRST, until=(2,)), replace(SECOND, inputs=(0,), borrowed=(0,)))
    assert with_savings(twice, ["offload"]).events == (
        *(1, 2, -2, 3, -1, -3),
        *(7, 9, 4, -9, -7),
        *(6, 8, 5, -6, -4, -8, -5),
    )


def test_what_somebody_keeps_beyond_the_backward_is_there_all_the_time() -> None:
    kept = step_of(FIRST, SECOND, events=(1, 2, 3, 4, -3, 5, -2, -4, -5))
    assert with_savings(kept, ["offload"]).events == (1, 2, 3, -2, -3, 7, 4, -7, 6, 5, -6, -4, -5)


class Again(nn.Module):
    """Calls the block `b` more than once."""

    def __init__(self, b: nn.Module, calls: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), b, nn.Linear(WIDTH, WIDTH)
        self._calls = calls

    def self_balance(self) -> list[nn.Module]:
        return [self.a, self.b, self.c]

    def forward(self, x: Tensor) -> Any:
        return self.c(self._calls(self.b, self.a(x)))


def on_its_output(block: Any, x: Tensor) -> Any:
    return block(block(x))


def on_its_output_that_others_use(block: Any, x: Tensor) -> Any:
    once = block(x)
    return block(once) * block(once) + once


def on_the_same(block: Any, x: Tensor) -> Any:
    return block(x) * block(x) + block(x)


def saves_its_output() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def saves_its_input() -> nn.Module:
    return nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def saves_neither() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))


WAYS = [on_its_output, on_its_output_that_others_use, on_the_same]
BLOCKS = [saves_its_output, saves_its_input, saves_neither]


def case_of(block: Callable[[], nn.Module], way: Any, precision: str = "32-true") -> Case:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Again(block(), way)

    def loss(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().mean()
        return found

    return Case(make, [torch.ones(64, WIDTH)] * 2, loss, precision=precision)


def test_a_trace_tells_what_a_later_call_uses_of_an_earlier_one() -> None:
    with simulate(2):
        profile = case_of(saves_neither, on_its_output, "bf16-mixed").plan().profile
    assert profile is not None
    *_, first, second, _ = profile.timeline.calls
    (cast,) = second.borrowed
    assert (first.block, second.block) == (1, 1)
    assert cast in first.saved
    assert profile.timeline.sizes[cast] == 2 * WIDTH * WIDTH  # the weight in bfloat16
    assert second.inputs not in (first.inputs, ())  # what the first has made, and no backward uses


@pytest.mark.parametrize("word", ["recompute", "offload"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("way", WAYS)
def test_peaks_are_those_of_a_run(way: Any, block: Any, word: str) -> None:
    with simulate(2):
        case = case_of(block, way)
        plan = replace(case.plan(), saving=(word,) * 3, assignment=(0, 1, 1), root=1)
        assert plan.profile is not None
        less = with_savings(plan.profile.timeline, plan.saving)
        assert replay(less, plan.assignment, plan.root, 2) == case.run(plan).peaks


@pytest.mark.parametrize("word", ["recompute", "offload"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("way", WAYS)
def test_it_rests_on_less_by_as_much_as_is_told(way: Any, block: Any, word: str) -> None:
    with simulate(2):
        profile = case_of(block, way, "bf16-mixed").plan().profile
    assert profile is not None

    def resting(words: list[str]) -> list[int]:
        """What every block holds, each on a device of its own, when the last backward begins."""
        timeline = with_savings(profile.timeline, words)
        at = max(position for name, position in timeline.marks if name.endswith(" backward"))
        return timeline.peaks(timeline.homes([0, 1, 2], 3), 3, at, at)

    freed = freed_bytes(profile.timeline, 3)
    less = freed.recomputed if word == "recompute" else freed.offloaded
    kept, saved = resting(["keep"] * 3), resting([word] * 3)
    assert [one - other for one, other in zip(kept, saved, strict=True)] == less.tolist()
    assert freed.offloaded[1] > 0
