"""Batches whose gradients one step adds up are planned as its micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

# Eight blocks of which each takes one second forward and two backward.
PROFILE = Profile.from_costs([4.0] * 8, [1.0] * 8, forward_time=[1.0] * 8, backward_time=[2.0] * 8, batch_size=1)


def test_a_window_takes_as_long_as_a_pipeline_of_its_batches() -> None:
    found = plan(PROFILE, [40] * 4, schedule="1f1b", micro_batches=16, accumulated=True)
    assert found.assignment == (0, 0, 1, 1, 2, 2, 3, 3)
    # Sixteen batches on four devices, six seconds each: the last one leaves three more behind the first.
    assert found.step_time == pytest.approx((16 + 3) * 6.0)
    whole = plan(PROFILE, [40] * 4, schedule="naive")
    assert 16 * whole.step_time == pytest.approx(found.step_time * 16 * 4 / 19)


def test_every_batch_of_a_window_is_as_large_as_the_profile_says() -> None:
    found = plan(PROFILE, [40] * 4, schedule="1f1b", micro_batches=16, accumulated=True)
    # Two blocks of four bytes, and one byte that each saves for every batch in flight: four on the first device.
    assert found.peaks == (16, 14, 12, 10)
    assert [block.saved for block in found.blocks] == [1] * 8


def test_a_window_is_told_as_such_and_saved(tmp_path: Path) -> None:
    found = plan(PROFILE, [40] * 4, schedule="1f1b", micro_batches=16, accumulated=True)
    assert "1f1b, the 16 batches that a step accumulates as micro-batches, bubble 16%" in str(found)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").accumulated
    assert found.max_batch() >= 1


def test_a_window_needs_its_number_of_batches() -> None:
    with pytest.raises(ValueError, match="needs to know how many batches a step adds up: say micro_batches="):
        plan(PROFILE, [40] * 4, schedule="1f1b", accumulated=True)
    with pytest.raises(ValueError, match="needs a schedule that splits batches"):
        plan(PROFILE, [40] * 4, schedule="naive", micro_batches=4, accumulated=True)
