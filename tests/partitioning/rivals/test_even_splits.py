from __future__ import annotations

from autobalance import Profile
from autobalance.partitioning.rivals.even_splits import even_by_layers, even_by_weights


def test_layers_are_counted_and_the_first_devices_take_one_more() -> None:
    assert even_by_layers(Profile.from_costs(static=[9, 1, 1, 1, 1]), 2) == [0, 0, 0, 1, 1]
    assert even_by_layers(Profile.from_costs(static=[1] * 8), 3) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert even_by_layers(Profile.from_costs(static=[1, 1]), 4) == [0, 1]


def test_weights_are_cut_at_equal_shares() -> None:
    assert even_by_weights(Profile.from_costs(static=[1, 1, 1, 1, 4, 4]), 3) == [0, 0, 0, 0, 1, 2]
    assert even_by_weights(Profile.from_costs(static=[0, 0]), 2) == [0, 0]
