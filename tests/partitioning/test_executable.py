from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from autobalance.partitioning.executable import refuse_to_run
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

PROFILE = Profile.from_costs([4] * 4, [2] * 4, forward_time=[1.0] * 4, batch_size=8)


def test_what_auto_plans_can_be_run() -> None:
    refuse_to_run(plan(PROFILE, [100] * 2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"schedule": "1f1b", "micro_batches": 8},
            "this plan runs 1f1b with 8 micro-batches, which is planned but cannot be run yet; make it with "
            "schedule='naive'.",
        ),
        ({"schedule": "gpipe"}, "this plan runs gpipe with 1 micro-batch, which"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_option_that_avoids_it(changes: dict[str, Any], told: str) -> None:
    asked = replace(plan(PROFILE, [100] * 2), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        refuse_to_run(asked)


@pytest.mark.parametrize(
    "changes",
    [
        {"saving": ("keep", "recompute", "offload", "keep")},
        {"streamed": (0, 3), "host_optimizer": (0, 1)},
    ],
)
def test_plans_whose_blocks_save_memory_can_be_run(changes: dict[str, Any]) -> None:
    refuse_to_run(replace(plan(PROFILE, [100] * 2), **changes))


def test_the_option_that_is_named_gives_a_plan_that_can_be_run() -> None:
    split = plan(PROFILE, [100] * 2, schedule="1f1b", micro_batches=4)
    with pytest.raises(ValueError, match="make it with schedule='naive'"):
        refuse_to_run(split)
    refuse_to_run(plan(PROFILE, [100] * 2, schedule="naive"))
