"""What `"auto"` leaves to micro-batches and recomputation, by policy."""

from __future__ import annotations

import pytest

from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

TIMES = {"forward_time": [1.0] * 8, "backward_time": [2.0] * 8}
PROFILE = Profile.from_costs([10] * 8, saved=[16] * 8, batch_size=8, **TIMES)


def test_the_fastest_plan_overlaps_parts_of_a_batch() -> None:
    found = plan(PROFILE, [1000] * 4)
    # With two visits of each device, half as long each, others wait half as long for the first and the last part.
    assert (found.schedule, found.micro_batches) == ("looped", 8)
    assert found.step_time == pytest.approx((8 + 3 / 2) * 6 / 8)
    assert set(found.saving) <= {"keep"}


@pytest.mark.parametrize("policy", ["balanced", "balanced_low_0", "sequential"])
def test_policies_that_know_no_time_take_batches_whole_where_these_fit(policy: str) -> None:
    found = plan(PROFILE, [1000] * 4, policy=policy)
    assert (found.schedule, found.micro_batches) == ("naive", 1)
    assert set(found.saving) <= {"keep"}


def test_they_split_a_batch_where_it_does_not_fit_as_a_whole_before_they_recompute() -> None:
    # Two blocks of 10 + 16 bytes are 52; of parts with 2 bytes in at most four at once, 20 + 16.
    found = plan(PROFILE, [40] * 4, policy="balanced")
    assert found.micro_batches > 1
    assert set(found.saving) <= {"keep"}
    assert found.fits


def test_blocks_recompute_of_themselves_where_nothing_else_fits() -> None:
    alone = Profile.from_costs([10] * 8, saved=[16] * 8, **TIMES)  # whose batch nobody knows how to split
    found = plan(alone, [40] * 4)
    assert "recompute" in found.saving
    assert found.step_time > plan(alone, [1000] * 4).step_time
