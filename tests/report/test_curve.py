from __future__ import annotations

import numpy as np

from autobalance.report.curve import thinned


def test_a_thinned_curve_keeps_peaks_valleys_and_its_end() -> None:
    generator = np.random.default_rng(0)
    alive = generator.integers(0, 10**6, size=50_000)
    positions = np.arange(50_000) * 2
    kept, values = thinned(positions, alive, count=100_000)
    assert len(kept) <= 1500
    assert (np.diff(kept) > 0).all()
    assert (values == alive[kept // 2]).all()
    for start in range(0, 50_000, 100):
        part = values[(kept >= 2 * start) & (kept < 2 * (start + 100))]
        assert part.max() == alive[start : start + 100].max()
        assert part.min() == alive[start : start + 100].min()
    assert kept[-1] == positions[-1]


def test_a_short_curve_stays_as_it_is() -> None:
    positions, alive = np.array([3, 9]), np.array([512, 0])
    assert [part.tolist() for part in thinned(positions, alive, count=10)] == [[3, 9], [512, 0]]
