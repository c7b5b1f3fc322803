from __future__ import annotations

import pytest
import torch
from torch import nn

import autobalance
from autobalance.profiling.holders import Parts, at_peak
from autobalance.profiling.timeline import HOST, ROOT, Timeline


def test_what_is_alive_at_the_highest_instant_is_told_the_largest_first() -> None:
    # 100 weights; 40 of an activation that dies; then 70 of logits: the peak is 170, without the activation.
    timeline = Timeline((100, 40, 70, 999), (0, 0, ROOT, HOST), (-1,) * 4, (1, 2, 4, -2, 3, -3))
    found, _ = at_peak(timeline, [("body", "Body")], ["weights", "", "", ""], ["", "relu 4x10", "addmm 7x10", ""])
    assert [(holder.blocks, holder.what, holder.nbytes) for holder in found] == [
        (("body",), "weights", 100),
        ((), "addmm 7x10", 70),
    ]
    assert [holder.share for holder in found] == pytest.approx([100 / 170, 70 / 170])


def test_a_copy_beside_its_original_is_counted_once() -> None:
    timeline = Timeline((50, 50, 10), (0, 1, 1), (3, 3, -1), (1, 2, 3))
    found, _ = at_peak(timeline, [("a", "A"), ("b", "B")], [""] * 3, ["mm", "mm", "add"])
    assert sum(holder.nbytes for holder in found) == 60
    assert sum(holder.share for holder in found) == pytest.approx(1)


def test_blocks_of_one_class_are_told_together() -> None:
    timeline = Timeline((10, 10, 30), (0, 1, 2), (-1,) * 3, (1, 2, 3))
    rows = [("layers.0", "Layer"), ("layers.1", "Layer"), ("head", "Head")]
    found, _ = at_peak(timeline, rows, ["weights"] * 3, [""] * 3)
    assert [(holder.blocks, holder.nbytes) for holder in found] == [(("head",), 30), (("layers.0", "layers.1"), 20)]


def test_parts_tell_tensors_from_formulas_and_allowances() -> None:
    timeline = Timeline((100, 40, 8, 5), (0,) * 4, (-1,) * 4, (1, 3, 4, -4, 2, -2))
    kinds = ["weights", "allowance", "workspace", "scratch"]
    found, parts = at_peak(timeline, [("body", "Body")], kinds, ["", "convolution", "cublas", "embedding"])
    assert parts == Parts(exact=100, modelled=8, allowance=40)
    assert [holder.what for holder in found] == ["weights", "allowance of convolution", "workspace of cublas"]


def test_logits_that_hold_most_of_the_peak_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096))
    profile = autobalance.profile(model, torch.zeros(512, 8), target="simulated", optimizer=torch.optim.SGD)
    largest = profile.holders[0]
    assert (largest.blocks[-1], largest.what.split()[1]) == ("1", "512x4096")
    assert largest.nbytes % (4 * 512 * 4096) == 0
