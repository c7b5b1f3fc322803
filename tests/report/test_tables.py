from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.report.render import render
from autobalance.report.tables import block_ranges, plan_table, profile_table

MIB = 2**20


def _profile() -> Profile:
    blocks = tuple(
        BlockCost(name, "Layer", weights=10 * MIB, gradients=10 * MIB, optimizer=20 * MIB, saved=5 * MIB)
        for name in ("embed", "layers.0", "layers.1", "layers.2", "head")
    )
    sizes = (45 * MIB,) * 5 + (MIB,)
    timeline = Timeline(sizes, (0, 1, 2, 3, 4, ROOT), (-1,) * 6, (1, 2, 3, 4, 5, 6))
    return Profile(blocks, timeline, batch="validation batch of 64", notes=("loss.item() was replaced",))


def _words(text: str, start: str) -> str:
    """The one line that starts so, with single spaces."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(start)]
    return " ".join(line.split())


def test_a_plan_has_one_line_for_each_device() -> None:
    devices = [Device("cuda:1", 200 * MIB), Device("cuda:3", 200 * MIB)]
    text = render(plan_table(plan(_profile(), devices)), width=120)
    assert "5 blocks on 2 devices, policy balanced, batch: validation batch of 64; sizes in MiB" in text
    assert _words(text, "0 cuda:1") == "0 cuda:1 embed … layers.1 30.00 30.00 60.00 15.00 135.00 200.00 67.5%"
    assert _words(text, "1 cuda:3") == "1 cuda:3 layers.2, head; batch, loss 20.00 20.00 40.00 10.00 91.00 200.00 45.5%"
    assert "largest use 67.5%, optimal; lower bounds: area 56.5% → indivisible block 56.5% → optimum 67.5%" in text
    assert "loss.item() was replaced" in text


def test_an_empty_device_is_said() -> None:
    text = render(plan_table(plan(Profile.from_costs([4, 4]), [10] * 3)), width=100)
    assert "(empty)" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    profile = Profile.from_costs([3 * 2**30] * 24, names=[f"model.decoder.layers.{i}" for i in range(24)])
    for drawing in (plan_table(plan(profile, "4x80GiB")), profile_table(profile)):
        assert max(len(line) for line in render(drawing, width=width).splitlines()) <= width


def test_three_or_more_neighbours_are_a_range() -> None:
    names = list("abcdefg")
    assert block_ranges([0, 1, 2, 5], names) == "a … c, f"
    assert block_ranges([0, 1, 3, 4, 5, 6], names) == "a, b, d … g"
    assert block_ranges([], names) == ""
    assert block_ranges([0, 1, 2], ["model.layers.3", "model.layers.4", "model.layers.5"]) == "model.layers.3 … 5"


def test_a_profile_has_one_line_for_each_run_of_equal_blocks_and_their_sum() -> None:
    text = render(profile_table(_profile()), width=120)
    assert "5 blocks, batch: validation batch of 64; sizes in MiB" in text
    assert _words(text, "embed") == "embed … head Layer 5 10.00 10.00 20.00 5.00 0 0"
    assert _words(text, "all ") == "all 5 50.00 50.00 100.00 25.00 0 0"
    assert "peak if all sat on one device: 226.00 MiB" in text
    assert "loss.item() was replaced" in text


def test_of_transient_bytes_the_largest_counts() -> None:
    profile = Profile.from_costs([1, 1, 2], transient=[7, 9, 8], forward_time=[0.001, 0.002, 0.001])
    text = render(profile_table(profile), width=100)
    assert _words(text, "block1") == "block1 1 1 9 9 2 0"
    assert _words(text, "all ") == "all 3 4 9 9 4 0"


def test_figures_are_never_cut() -> None:
    text = render(plan_table(plan(Profile.from_costs([3 * 2**30] * 8), "4x80GiB")), width=80)
    assert text.count(" 80.00 ") == 4
    assert sum(" 80.00 " in line and line.endswith(" 7.5%") for line in text.splitlines()) == 4


def test_columns_of_zeros_are_left_out() -> None:
    text = render(plan_table(plan(Profile.from_costs([3] * 8), [80] * 4)), width=80)
    assert "weights" in text
    assert "optim " not in text
