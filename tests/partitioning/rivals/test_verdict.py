from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.partitioning.rivals.alternatives import Alternative
from autobalance.partitioning.rivals.verdict import verdict
from autobalance.partitioning.score import Score

GIB = 2**30
OURS = Score((0, 1), 1, (60 * GIB, 70 * GIB), (80 * GIB, 80 * GIB), step_time=0.9, optimizer_times=(0.05, 0.1))
DDP = Alternative("DDP", 90 * GIB, 80 * GIB, 0, 0, step_time=0.5, optimizer_time=0.1, parts=1)
FSDP = Alternative("FSDP full shard", 50 * GIB, 80 * GIB, 0, 0, step_time=1.9, optimizer_time=0.1, parts=1)


@pytest.mark.parametrize(
    ("ours", "others", "sentence"),
    [
        (
            OURS,
            [DDP, replace(FSDP, peak=85 * GIB)],
            "This plan is the only one that fits: DDP needs 90.00 GiB, FSDP full shard needs 85.00 GiB of the 80.00 "
            "GiB on each device.",
        ),
        (
            OURS,
            [DDP, FSDP],
            "This plan is the better choice here: a step takes 1.00 s, 50% less than the 2.00 s of FSDP full shard, "
            "the fastest alternative that fits (DDP would not).",
        ),
        (
            OURS,
            [replace(DDP, peak=70 * GIB), FSDP],
            "DDP is the better choice here: a step takes 600 ms, 40% less than the 1.00 s of this plan, with 70.00 GiB "
            "on each device.",
        ),
        (
            OURS,
            [replace(DDP, peak=70 * GIB, step_time=0.88)],
            "DDP is as fast as this plan here and needs no split: a step takes 980 ms there, 1.00 s here, with 70.00 "
            "GiB on each device.",
        ),
        (
            replace(OURS, peaks=(81 * GIB, 0)),
            [DDP, replace(FSDP, host=9 * GIB)],
            "FSDP full shard is the better choice here: it fits, with 50.00 GiB on each device and 9.00 GiB in the "
            "host's memory, and this plan does not.",
        ),
        (
            replace(OURS, peaks=(81 * GIB, 0)),
            [DDP],
            "Nothing fits here, nor does this plan: DDP needs 90.00 GiB of the 80.00 GiB on each device.",
        ),
        (
            replace(OURS, step_time=0.0, optimizer_times=()),
            [FSDP],
            "FSDP full shard fits as well, with 50.00 GiB on each device; which is faster is not known, as no times "
            "are.",
        ),
    ],
)
def test_the_sentence_says_which_is_better_and_by_how_much(
    ours: Score, others: list[Alternative], sentence: str
) -> None:
    assert verdict(ours, others) == sentence
