from __future__ import annotations

import pytest

from autobalance.report.comparison import Contender, comparison_table
from autobalance.report.render import render

GIB = 2**30


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_ways_stand_side_by_side_below_the_budgets() -> None:
    ours = Contender("autobalance", (GIB, 2 * GIB), (4 * GIB, 4 * GIB), 0.25, 3 * 2**20, "(1f1b, 8 parts)")
    even = Contender("even by layers", (GIB, 5 * GIB), (4 * GIB, 4 * GIB), 0.5, 2**20)
    lines = _lines(render(comparison_table([ours, even, Contender("accelerate")]), width=100))
    assert lines[0] == "peaks and budgets in GiB, bytes moved between devices per step"
    assert lines[1] == "split peak 0 peak 1 use fits step moved"
    assert lines[3:] == [
        "(budget) 4.00 4.00",
        "autobalance (1f1b, 8 parts) 1.00 2.00 50.0% yes 250 ms 3.00 MiB",
        "even by layers 1.00 5.00 125.0% no 500 ms 1.00 MiB",
        "accelerate no",
    ]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_at_80_columns_no_figure_is_cut(count: int) -> None:
    peaks = tuple((10 + device) * GIB for device in range(count))
    way = Contender("autobalance", peaks, (80 * GIB,) * count, 1.25, 3 * 2**20, "(1f1b, 8 parts)")
    text = render(comparison_table([way]), width=80)
    assert max(map(len, text.splitlines())) <= 80
    words = text.split()
    assert all(f"{10 + device}.00" in words for device in range(count))
    assert {"1.25", "3.00", "MiB", "yes"} <= set(words)
