from __future__ import annotations

import numpy as np

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.chains.tables import Tables
from autobalance.partitioning.chains.uses import (
    bases_are_allowed,
    largest_base,
    largest_use,
    least_use_of_short_stages,
    uses_between,
)
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT

CHAIN = Chain(((0,), (1,), (2, ROOT)), (), {})
KINDS = Kind((0, 2), 10), Kind((1,), 20)


def _tables() -> Tables:
    """Blocks of 1, 2 and 4 bytes and seconds, on two devices of 10 bytes and one of 20."""
    memory = StageMemory(Profile.from_costs([1, 2, 4]).timeline, CHAIN, 3)
    seconds, arriving = [np.array([1.0, 2.0, 4.0])] * 2, [np.zeros((2, 3, 3))] * 2
    return Tables(KINDS, CHAIN, memory, seconds, [0.0, 0.0], arriving, in_flight=lambda left: 1, width=3)


def test_the_largest_use_is_that_of_the_fullest_device() -> None:
    assert largest_use(_tables(), ((0, 0, 2), (1, 2, 3))) == 3 / 10
    assert largest_use(_tables(), ((1, 0, 2), (0, 2, 3))) == 4 / 10


def test_devices_without_a_stage_use_nothing_here() -> None:
    assert largest_base(_tables()) == 0.0
    assert bases_are_allowed(_tables())


def test_different_uses_lie_between_two_others() -> None:
    assert uses_between(_tables(), 0.2, 0.6).tolist() == [3 / 10, 7 / 20, 4 / 10]
    assert uses_between(_tables(), 0.2, 0.6, kinds=(1,)).tolist() == [6 / 20, 7 / 20]


def test_stages_that_take_the_whole_step_time_count_for_no_least_use() -> None:
    # 1 | 2 | 4, the last on the larger device: none takes more than 4 seconds.
    assert least_use_of_short_stages(_tables(), micro_batches=1, limit=4.0) == 4 / 20
    assert least_use_of_short_stages(_tables(), micro_batches=2, limit=7.0) == np.inf
