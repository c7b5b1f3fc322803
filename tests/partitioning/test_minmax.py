from __future__ import annotations

import random
from itertools import combinations_with_replacement

import numpy as np
import pytest

from autobalance.partitioning.minmax import fairest, least_largest


def _instance(seed: int) -> list[np.ndarray]:
    """Uses in no relation to each other, with ties and forbidden stages: the search must not rely on sums or order."""
    rng = random.Random(seed)
    units, devices = rng.randint(1, 6), rng.randint(1, 4)
    uses = []
    for _ in range(devices):
        use = np.array([[float(rng.choice([0, 1, 2, 3, np.inf])) for _ in range(units + 1)] for _ in range(units + 1)])
        use[np.tril_indices(units + 1, -1)] = np.inf
        uses.append(use)
    return uses


def _all(uses: list[np.ndarray], held: list[bool]) -> list[tuple[tuple[float, ...], tuple[int, ...]]]:
    units = uses[0].shape[0] - 1
    found = []
    for inner in combinations_with_replacement(range(units + 1), len(uses) - 1):
        cuts = (0, *inner, units)
        stages = [(cuts[d], cuts[d + 1]) for d in range(len(uses))]
        values = sorted((uses[d][stage] for d, stage in enumerate(stages)), reverse=True)
        empty = sum(start == stop and not busy for (start, stop), busy in zip(stages, held, strict=True))
        if np.isfinite(values[0]):
            found.append(((values[0], empty, *values), cuts))
    return found


@pytest.mark.parametrize("seed", range(150))
def test_the_fairest_of_all_partitions_is_found(seed: int) -> None:
    uses = _instance(seed)
    rng = random.Random(seed)
    held = [rng.random() < 0.2 for _ in uses]
    everything = _all(uses, held)
    found = fairest(uses, held)
    if not everything:
        assert found is None
        assert least_largest(uses)[0][0] == np.inf
        return
    assert found is not None
    key, cuts = found
    assert key == min(everything)[0]
    assert (key, cuts) in everything
    assert least_largest(uses)[0][0] == key[0]


def test_equal_partitions_fill_earlier_devices_first() -> None:
    use = np.array([[0.0, 1, 2, 3], [np.inf, 0, 1, 2], [np.inf, np.inf, 0, 1], [np.inf] * 3 + [0]])
    found = fairest([use, use], [False, False])
    assert found is not None
    assert found[1] == (0, 2, 3)
