from __future__ import annotations

import random

import pytest

from tests.partitioning.brute_force import Machine, Question, best, outcome
from tests.partitioning.random_questions import KINDS, differences


def test_the_walk_agrees_with_a_calculation_by_hand() -> None:
    question = Question(
        static=(10, 20, 30),
        saved=(4, 8, 6),
        transient=(6, 4, 2),
        transfer=(2, 6, 0),
        forward=(1.0, 2.0, 3.0),
        backward=(2.0, 4.0, 6.0),
        machines=(Machine(100), Machine(100, slowness=2.0, link=4.0)),
        samples=2,
    )
    found = outcome(question, (0, 0, 1), ("keep", "recompute", "keep"), 2, "1f1b")
    # Two micro-batches, each of half the bytes, are in flight on device 0: static 30 and twice the 2 of block 0 and the
    # 1 that goes into block 1. In the first backward, block 1 has all of its 4 again and takes 2: 30 + 6 + 3 + 2.
    # On device 1, one at a time: 30 + 3 + 1.
    assert found.peaks == (41, 34)
    # Half of 1 + 2 + 2 + 4 and of another forward of 2; half of twice 9, and 3 bytes there and back over 4 B/s.
    assert found.stage_times == (5.5, 9.0 + 6 / 4)
    assert found.step_time == 5.5 + 2 * 10.5


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_beats_the_planner_s_and_a_walk_confirms_its_figures(kind: str) -> None:
    for seed in range(40):
        question = KINDS[kind](random.Random(seed))
        assert not differences(question, best(question)), f"seed {seed}"
