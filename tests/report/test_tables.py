from __future__ import annotations

import pytest

from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.report.render import render
from autobalance.report.tables import profile_table

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


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    profile = Profile.from_costs([3 * 2**30] * 24, names=[f"model.decoder.layers.{i}" for i in range(24)])
    assert max(len(line) for line in render(profile_table(profile), width=width).splitlines()) <= width


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
