from __future__ import annotations

from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.solution import Solution, on_devices


def test_stages_take_the_devices_of_their_kind_in_order() -> None:
    kinds = (Kind((0, 3), 10), Kind((1, 2), 20))
    assert on_devices(((1, 0, 2), (0, 2, 3), (1, 3, 7), (0, 7, 8)), kinds) == (
        (1, 0, 2),
        (0, 2, 3),
        (2, 3, 7),
        (3, 7, 8),
    )


def test_devices_save_where_blocks_recompute_or_stream_or_the_optimizer_is_on_the_host() -> None:
    assignment = (0, 0, 1, 2, 3)
    plain = Solution((1.0,), assignment, 3, True)
    assert plain.saves_on == frozenset()
    saving = Solution(
        (1.0,),
        assignment,
        3,
        True,
        saving=("keep", "offload", "keep", "keep", "keep"),
        streamed=(3,),
        host_optimizer=(3,),
    )
    assert saving.saves_on == {0, 2, 3}
