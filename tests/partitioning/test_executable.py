from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autobalance.partitioning.executable import refuse_micro_batches
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

PROFILE = Profile.from_costs([4] * 4, [2] * 4, forward_time=[1.0] * 4, batch_size=8)


def test_a_plan_for_parts_of_batches_names_who_runs_it_and_the_option_that_avoids_it() -> None:
    split = plan(PROFILE, [100] * 2, schedule="1f1b", micro_batches=8)
    told = (
        "this plan runs 1f1b with 8 micro-batches, which need the step's loss and its backward, and not just calls of "
        "the model: train with Trainer(strategy=SelfBalanceStrategy(plan=...)), or make the plan with schedule='naive'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        refuse_micro_batches(split)


def test_plans_for_whole_batches_run_however_blocks_save_memory() -> None:
    whole = plan(PROFILE, [100] * 2, schedule="naive")
    refuse_micro_batches(whole)
    refuse_micro_batches(replace(whole, saving=("recompute", "offload", "keep", "keep"), streamed=(3,)))
