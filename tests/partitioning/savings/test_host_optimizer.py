from __future__ import annotations

import pytest

from autobalance.partitioning.savings.host_optimizer import host_optimizer
from autobalance.profiling.block_cost import BlockCost


def test_state_leaves_the_device_and_gradients_and_weights_are_copied_once_per_step() -> None:
    blocks = [BlockCost("a", weights=12, gradients=12, optimizer=24), BlockCost("frozen", weights=50)]
    price = host_optimizer(blocks, host_link=6.0, host_bandwidth=42.0)
    assert (price.freed, price.held, price.moved, price.pinned) == (24, 24, 24, 32)
    # 12 bytes each way; 12 of gradients, 12 of weights and 24 of state read, the last two written.
    assert price.seconds == pytest.approx(24 / 6 + (12 + 2 * (12 + 24)) / 42)
    assert host_optimizer(blocks, 6.0, 42.0, sharing=2).seconds == pytest.approx(24 / 6 + 2 * 84 / 42)


def test_without_state_nothing_is_gained_or_lost() -> None:
    price = host_optimizer([BlockCost("sgd", weights=12, gradients=12)], host_link=6.0)
    assert (price.freed, price.moved, price.seconds, price.pinned) == (0, 0, 0, 0)


def test_rates_are_above_zero() -> None:
    with pytest.raises(ValueError, match=r"host_link=0, host_bandwidth=4\.0 and sharing=1: rates must be above 0"):
        host_optimizer([], 0, 4.0)
