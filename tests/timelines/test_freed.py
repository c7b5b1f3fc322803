"""Bytes that blocks let go of, against the difference in a replay between forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import autobalance
from autobalance import Profile
from autobalance.timelines.freed import freed_bytes
from autobalance.timelines.recompute import with_savings
from tests.models import CASES


def loss(model: Any, batch: Any) -> Any:
    return model.training_step(batch, 0)


@pytest.mark.parametrize("case", ["gpt", "batch norm convnet"])
@pytest.mark.parametrize("word", ["recompute", "offload"])
def test_a_block_rests_on_that_much_less(case: str, word: str) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    model, batch = CASES[case].make(), CASES[case].batches()[0]
    profile = autobalance.profile(model, batch, optimizer=optimizer, step=loss, target="simulated")
    count = len(profile.blocks)
    freed = freed_bytes(profile.timeline, count)
    assert freed.known.all()
    assert freed.recomputed.max() > 0

    def resting(words: list[str]) -> list[int]:
        """What every block holds, each on a device of its own, when the last backward begins."""
        timeline = with_savings(profile.timeline, words)
        at = max(position for name, position in timeline.marks if name.endswith(" backward"))
        return timeline.peaks(timeline.homes([*range(count)], count), count, at, at)

    plain = resting(["keep"] * count)
    less = freed.recomputed if word == "recompute" else freed.offloaded
    assert [one - other for one, other in zip(plain, resting([word] * count), strict=True)] == less.tolist()


def test_of_the_textbook_saved_bytes_all_but_the_inputs_go() -> None:
    profile = Profile.from_costs([1, 1, 1], [5, 6, 7], [2, 2, 2], transfer=[3, 4])
    freed = freed_bytes(profile.timeline, 3)
    assert freed.recomputed.tolist() == [5, 6 - 3, 7 - 4]
    assert freed.offloaded.tolist() == [5, 6, 7]
    assert freed.pinned.tolist() == [8, 8, 8]
