"""Random numbers after a trial are those that would have come without it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from autobalance.profiling.sandbox import random_state_kept


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with random_state_kept():
        draw()
        torch.manual_seed(5)
    assert draw() == expected


def test_random_numbers_are_kept_when_the_trial_fails() -> None:
    before = torch.get_rng_state()

    def fail() -> None:
        with random_state_kept():
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
