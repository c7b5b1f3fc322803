"""Options are checked as soon as they are given, by errors that say what there is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autobalance.strategy.options import Options


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("policy", "fastest", "`policy='fastest'` does not exist. Choose from: 'auto', 'balanced', 'balanced_low_0'"),
        ("micro_batches", 0, "`micro_batches=0` does not exist. Choose from: 'auto', 'accumulate', a number from 1"),
        ("micro_batches", True, "`micro_batches=True` does not exist."),
        ("micro_batches", "many", "`micro_batches='many'` does not exist."),
        ("schedule", "dualpipe", "`schedule='dualpipe'` does not exist. Choose from: 'auto', 'naive', 'gpipe', '1f1b'"),
        ("batch_norm", "sync", "`batch_norm='sync'` does not exist. Choose from: 'fallback', 'deferred'."),
        ("recompute", 1, "`recompute=1` does not exist. Choose from: 'auto', True, False."),
        ("offload", "auto", "`offload='auto'` does not exist. Choose from: True, False."),
        ("rebalance", "auto", "`rebalance='auto'` does not exist. Choose from: True, False."),
        (
            "worst_batch",
            "longest",
            "`worst_batch='longest'` is no way to find a batch. Give the batch itself, or 'scan:2",
        ),
        ("worst_batch", "scan:0", "`worst_batch='scan:0'` is no way to find a batch."),
    ],
)
def test_what_does_not_exist_is_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Options(**{option: value})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "minimize_first_gpu_memory", "micro_batches": 1, "schedule": "naive", "recompute": False},
        {"micro_batches": 4, "schedule": "looped", "recompute": True, "offload": True, "batch_norm": "deferred"},
        {"micro_batches": "accumulate", "schedule": "1f1b", "rebalance": True},
        {"retry_on_oom": False, "max_memory": {0: "1GiB"}, "pin": {"head": 0}, "worst_batch": [1, 2]},
    ],
)
def test_what_exists_is_taken(options: dict[str, Any]) -> None:
    assert Options(**options).batches_to_scan == 1


def test_a_scan_says_how_many_batches() -> None:
    assert Options(worst_batch="scan:200").batches_to_scan == 200


@pytest.mark.parametrize("micro_batches", [4, "accumulate"])
def test_whole_batches_one_after_the_other_have_no_parts(micro_batches: int | str) -> None:
    message = re.escape(f"`micro_batches={micro_batches!r}` needs a schedule that overlaps micro-batches")
    with pytest.raises(ValueError, match=f"^{message}"):
        Options(micro_batches=micro_batches, schedule="naive")
