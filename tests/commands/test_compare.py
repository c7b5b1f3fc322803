from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import autobalance
from autobalance import Profile

MIB = 2**20
Run = Callable[..., str]


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the lines that tell a share, by the first."""
    cells = [re.split(r"  +", line.strip()) for line in text.splitlines() if "%" in line]
    return {name: more for name, *more in cells}


def test_compare_judges_all_splits_by_one_replay(profile: Path, tmp_path: Path, run: Run) -> None:
    by_hand = tmp_path / "by_hand.json"
    by_hand.write_text(json.dumps({"embed": "cuda:1", "layers": 0, "head": 1}))
    saved = tmp_path / "saved.json"
    run("plan", profile, "2x40MiB", "--policy", "sequential", "-o", saved)
    found = rows(run("compare", profile, "2x15MiB", "--map", by_hand, "--map", saved))
    found.pop("accelerate", None)
    assert {name: cells[:4] for name, cells in found.items()} == {
        "autobalance": ["12.00", "12.00", "80.0%", "yes"],
        "even by layers": ["16.00", "8.00", "106.7%", "no"],
        "even by weights": ["16.00", "8.00", "106.7%", "no"],
        "by_hand.json": ["8.00", "16.00", "106.7%", "no"],
        "saved.json": ["24.00", "0.00", "160.0%", "no"],
    }


def test_compare_without_a_plan_that_fits_shows_the_others(profile: Path, run: Run) -> None:
    text = run("compare", profile, "2x11MiB")
    assert "even by weights" in text
    assert "autobalance has no plan: " in text


def test_compare_tells_what_a_saved_plan_is_for_where_it_is_for_something_else(
    profile: Path, tmp_path: Path, run: Run
) -> None:
    other = Profile.from_costs(static=[1, 1], names=["a", "b"])
    autobalance.plan(other, [8, 8]).save(tmp_path / "other.json")
    text = run("compare", profile, "2x15MiB", "--map", tmp_path / "other.json")
    assert "other.json: the plan is for another model than the profile: the plan lacks 'embed', 'layers.0'" in text


def test_compare_counts_bytes_that_move_and_parts(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "profile.json"
    costs = {"saved": [MIB] * 4, "transfer": [MIB] * 3, "forward_time": [1.0] * 4, "backward_time": [2.0] * 4}
    Profile.from_costs(static=[MIB] * 4, **costs, batch_size=4).save(path)
    text = run("compare", path, "2x5MiB", "--micro-batches", "4", "--schedule", "1f1b")
    assert "all run 1f1b with the batch in 4 parts" in text
    found = rows(text)
    # Half of the blocks on each device: two weights, and two micro-batches in flight on the first, one on the second,
    # of a quarter of two saved tensors each. What crosses once, and its gradient, is 1 MiB each.
    cells = found["even by layers"]
    assert cells[:4] == ["3.00", "2.50", "60.0%", "yes"]
    # Five quarters of the time of half the blocks.
    assert cells[4:] == ["7.50 s", "2.00 MiB"]


def test_compare_says_what_could_be_done_instead(tmp_path: Path, run: Run, profile: Path) -> None:
    path = tmp_path / "scalable.json"
    times = {"forward_time": [1.0, 1.0], "backward_time": [1.0, 1.0]}
    Profile.from_costs(static=[4 * MIB] * 2, saved=[MIB] * 2, **times, batch_size=4).save(path)
    text = run("compare", path, "2x1GiB")
    assert "DDP" in text
    assert "ZeRO-3 with offload" in text
    # Two devices with half of the batch each are twice as fast as one stage at a time, and small weights are soon sent.
    assert "is the better choice here: a step takes" in text
    text = run("compare", profile, "2x15MiB")
    assert "DDP, FSDP and ZeRO are left out: each device would run a part of the batch" in text
    assert "autobalance profile --scalable" in " ".join(text.split())
    assert "\n\n\n" not in text


@pytest.mark.usefixtures("factory")
def test_compare_says_that_one_sample_cannot_be_shared_out(run: Run) -> None:
    text = " ".join(run("compare", "factory.py:make", "2x15MiB", "--batch", "1", "--target", "cpu").split())
    assert "left out: 1 sample cannot be shared out over 2 devices; say --batch 2 or more" in text
