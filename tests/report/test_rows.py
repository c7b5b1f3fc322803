from __future__ import annotations

import pytest

from autobalance.report.rows import ticks


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (77.6, [0, 20, 40, 60]),
        (80, [0, 20, 40, 60, 80]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.03, [0, 0.01, 0.02, 0.03]),
    ],
)
def test_ticks_are_round_and_few(largest: float, expected: list[float]) -> None:
    assert ticks(largest) == pytest.approx(expected)
