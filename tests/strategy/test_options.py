"""Options are checked as soon as they are given, by errors that say what there is."""

from __future__ import annotations

import re
from typing import Any

import pytest

import autobalance
from autobalance.profiling.profile import Profile
from autobalance.strategy.options import Options


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("policy", "fastest", "`policy='fastest'` does not exist. Choose from: 'auto', 'balanced', 'balanced_low_0'"),
        ("micro_batches", 4, "`micro_batches=4` can be planned, but not be run yet. Choose from: 'auto', 1."),
        ("micro_batches", 0, "`micro_batches=0` does not exist. Choose from: 'auto', 1."),
        ("micro_batches", True, "`micro_batches=True` does not exist."),
        ("schedule", "1f1b", "`schedule='1f1b'` can be planned, but not be run yet. Choose from: 'auto', 'naive'."),
        ("schedule", "dualpipe", "`schedule='dualpipe'` does not exist. Choose from: 'auto', 'naive'."),
        ("batch_norm", "sync", "`batch_norm='sync'` does not exist. Choose from: 'fallback'."),
        ("recompute", True, "`recompute=True` can be planned, but not be run yet. Choose from: 'auto', False."),
        ("offload", True, "`offload=True` can be planned, but not be run yet. Choose from: False."),
        ("rebalance", True, "`rebalance=True` does not exist. Choose from: False."),
        (
            "worst_batch",
            "longest",
            "`worst_batch='longest'` is no way to find a batch. Give the batch itself, or 'scan:2",
        ),
        ("worst_batch", "scan:0", "`worst_batch='scan:0'` is no way to find a batch."),
    ],
)
def test_what_does_not_exist_or_cannot_be_run_is_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Options(**{option: value})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "minimize_first_gpu_memory", "micro_batches": 1, "schedule": "naive", "recompute": False},
        {"retry_on_oom": False, "max_memory": {0: "1GiB"}, "pin": {"head": 0}, "worst_batch": [1, 2]},
    ],
)
def test_what_exists_is_taken(options: dict[str, Any]) -> None:
    assert Options(**options).batches_to_scan == 1


def test_a_scan_says_how_many_batches() -> None:
    assert Options(worst_batch="scan:200").batches_to_scan == 200


def test_a_plan_that_cannot_be_run_is_refused_as_soon_as_it_is_given() -> None:
    split = autobalance.plan(Profile.from_costs([4] * 4, batch_size=8), [100] * 2, schedule="gpipe", micro_batches=4)
    with pytest.raises(
        ValueError, match="this plan runs gpipe with 4 micro-batches, which is planned but cannot be run"
    ):
        autobalance.SelfBalanceStrategy(plan=split)
