from __future__ import annotations

from pathlib import Path

import pytest

import autobalance
from autobalance import Profile
from autobalance.partitioning.largest_batch import largest_batch, last_that_fits


def scalable(batch_size: int = 2) -> Profile:
    """Four blocks of 10 bytes that keep 3 bytes of each sample for the backward pass."""
    return Profile.from_costs(static=[10] * 4, saved=[3 * batch_size] * 4, batch_size=batch_size)


def test_the_largest_batch_fills_the_fullest_device() -> None:
    # Two blocks on each device: 20 + 6 b <= 50.
    assert largest_batch(scalable(), [50, 50], policy="balanced", recompute=False) == 5
    assert largest_batch(scalable(), [49, 50], policy="balanced", recompute=False) == 4
    # All on the first: 40 + 12 b <= 100.
    assert largest_batch(scalable(), [100, 0], policy="sequential", recompute=False) == 5
    assert largest_batch(scalable(batch_size=64), [50, 50], policy="balanced", recompute=False) == 5


def test_pins_and_limits_count() -> None:
    # Three blocks on the first device: 30 + 9 b <= 57.
    pins = {"block0": 0, "block1": 0, "block2": 0}
    asked = {"policy": "balanced", "recompute": False}
    assert largest_batch(scalable(), [57, 100], pin=pins, **asked) == 3
    assert largest_batch(scalable(), [100, 100], max_memory={0: 50, 1: 50}, **asked) == 5


def test_blocks_that_may_recompute_let_a_larger_batch_fit() -> None:
    # Two blocks on each device, of which one at a time holds what it saves: 20 + 3 b <= 50.
    assert largest_batch(scalable(), [50, 50], policy="balanced", recompute=True) == 10


def test_no_batch_fits_where_weights_do_not() -> None:
    assert largest_batch(scalable(), [15, 15]) == 0


def test_a_profile_of_one_batch_says_why_there_is_no_answer() -> None:
    with pytest.raises(ValueError, match="how bytes depend on the number of samples is not known"):
        largest_batch(Profile.from_costs(static=[1], saved=[1]), [10])


def test_a_step_that_does_not_depend_on_its_batch_has_no_largest() -> None:
    with pytest.raises(ValueError, match="memory does not limit it"):
        largest_batch(Profile.from_costs(static=[1], batch_size=1), [10])


@pytest.mark.parametrize(("start", "least"), [(1, 1), (8, 1), (1000, 1), (3, 3)])
def test_the_search_ends_at_the_last_number_that_fits(start: int, least: int) -> None:
    for last in (*range(least, 40), 999):
        asked = []

        def fits(number: int, last: int = last, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number <= last

        assert last_that_fits(fits, least, start) == last
        assert len(asked) == len(set(asked)) <= 24
    assert last_that_fits(lambda number: False, least, start) == 0


def test_a_plan_of_this_process_knows_its_largest_batch(tmp_path: Path) -> None:
    asked = {"policy": "balanced", "recompute": False}
    plan = autobalance.plan(scalable(), [50, 50], micro_batches=1, **asked)
    assert plan.max_batch() == 5
    # The first device holds two of four parts at once: 20 + 2 x 6 c <= 50 for parts of c = 2 samples, not of 3.
    parts = autobalance.plan(scalable(4), [50, 50], micro_batches=4, schedule="1f1b", **asked)
    assert parts.max_batch() == 8
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"load that profile, and ask a plan made from it"):
        autobalance.Plan.load(tmp_path / "plan.json").max_batch()
