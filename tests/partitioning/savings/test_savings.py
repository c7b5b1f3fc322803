from __future__ import annotations

import pytest

from autobalance.partitioning.savings.savings import saving_costs
from autobalance.profiling.block_cost import BlockCost
from autobalance.units import pinned_bytes

BLOCKS = (
    BlockCost("frozen", weights=10, saved=9, inputs=4),
    BlockCost("trained", weights=10, gradients=10, optimizer=20, saved=3, inputs=3),
)


def test_pinned_buffers_are_rounded_up_to_powers_of_two() -> None:
    assert [pinned_bytes([size]) for size in (0, 1, 2, 3, 4, 5, 1025)] == [0, 1, 2, 4, 4, 8, 2048]
    assert pinned_bytes([3, 5]) == 4 + 8


def test_weights_stream_where_they_may() -> None:
    costs = saving_costs(BLOCKS, [1.0, 2.0], stream=("frozen",))
    assert (costs.streamable.tolist(), costs.carried.tolist(), costs.staged.tolist()) == ([10, 0], [20, 0], [10, 0])
    # A trained block has state on its device, or is on the host as a whole; its gradients then go there as well.
    costs = saving_costs(BLOCKS, [1.0, 2.0], stream=("frozen", "trainable"))
    assert (costs.static.tolist(), costs.streamable.tolist()) == ([10, 40], [10, 0])
    costs = saving_costs(BLOCKS, [1.0, 2.0], stream=("frozen", "trainable"), optimizer_on_host=True)
    assert (costs.streamable.tolist(), costs.carried.tolist(), costs.staged.tolist()) == ([10, 20], [20, 30], [10, 20])
    assert costs.static.tolist() == [10, 20]
    assert costs.pinned_weights.tolist() == [16, 16 + 16]
    # Without a backward, weights come once.
    assert saving_costs(BLOCKS, [1.0, 2.0], stream=("frozen",), training=False).carried.tolist() == [10, 0]


def test_only_what_saves_memory_is_recomputed() -> None:
    costs = saving_costs(BLOCKS, [1.0, 2.0])
    assert (costs.recomputable.tolist(), costs.offloadable.tolist()) == ([True, False], [False, False])
    assert saving_costs(BLOCKS, [1.0, 2.0], recompute=False, offload=True).offloadable.all()


def test_what_is_asked_wrongly_is_said() -> None:
    with pytest.raises(ValueError, match="forward_time has 1 entries for 2 blocks"):
        saving_costs(BLOCKS, [1.0])
    with pytest.raises(ValueError, match="stream names 'all'; choose among 'frozen' and 'trainable'"):
        saving_costs(BLOCKS, [1.0, 2.0], stream=("all",))
