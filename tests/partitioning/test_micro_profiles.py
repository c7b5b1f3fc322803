"""What micro-batches share is counted once, and what they add to one another for all but the first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobalance
from autobalance.partitioning.micro_profiles import micro_profile
from autobalance.profiling.profile import Profile

WIDTH = 64
WEIGHT, BIAS = WIDTH * WIDTH, WIDTH  # elements
COUNT = 4
SHARE = (COUNT - 1) / COUNT


def traced(precision: str) -> Profile:
    """Two linear layers; sizes are multiples of what a device rounds to, and so are their gradients but for biases."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return autobalance.profile(model, (torch.zeros(8, WIDTH),), precision=precision, target="A100", scalable=True)


def moved(profile: Profile, direction: str) -> int:
    """Bytes that the second layer reads and writes."""
    return sum(part.traffic for part in getattr(profile.blocks[1], f"{direction}_work"))


def launched(profile: Profile, direction: str) -> int:
    return sum(part.launches for part in getattr(profile.blocks[1], f"{direction}_work"))


@pytest.mark.parametrize("schedule", ["1f1b", "looped", "gpipe"])
def test_gradients_are_added_to_those_of_the_micro_batch_before(schedule: str) -> None:
    profile = traced("32-true")
    alone, part = profile.scaled(2), micro_profile(profile, COUNT, schedule=schedule)
    gradients = 4 * WEIGHT + 512  # the bias's rounded up
    assert moved(part, "forward") == moved(alone, "forward")
    # Two are read and their sum is written, three times of four.
    assert moved(part, "backward") - moved(alone, "backward") == 3 * gradients * SHARE
    assert launched(part, "backward") - launched(alone, "backward") == round(2 * SHARE)


def test_casts_of_weights_are_made_once_and_their_gradients_turned_back_for_each_backward() -> None:
    profile = traced("bf16-mixed")
    alone, part = profile.scaled(2), micro_profile(profile, COUNT, schedule="1f1b")
    casts = 2 * WEIGHT + 512
    # Float32 is read and half of it written.
    assert moved(alone, "forward") - moved(part, "forward") == 3 * casts * SHARE
    assert launched(alone, "forward") - launched(part, "forward") == round(2 * SHARE)
    assert moved(part, "backward") - moved(alone, "backward") == 3 * (4 * WEIGHT + 512) * SHARE
    assert part.blocks[1].saved == alone.blocks[1].saved - casts


def test_one_backward_of_all_adds_up_the_gradients_of_casts_and_turns_them_back_once() -> None:
    profile = traced("bf16-mixed")
    alone, part = profile.scaled(2), micro_profile(profile, COUNT, schedule="gpipe")
    # A sum of halves moves 3 x 2 bytes of an element, a cast less as much: what is left is a rounded bias.
    assert abs(moved(part, "backward") - moved(alone, "backward")) <= 3 * 1024
    assert launched(part, "backward") == launched(alone, "backward")
