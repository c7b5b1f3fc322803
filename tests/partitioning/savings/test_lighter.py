"""Two stages of four blocks: cut in the middle, the first one has to offload; cut before that, both keep everything."""

from __future__ import annotations

import numpy as np
import pytest

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.policies import Cut
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.savings.lighter import copying_less
from autobalance.partitioning.savings.saver import Saver, unit_costs
from autobalance.partitioning.savings.saving_tables import SavingTables
from autobalance.partitioning.savings.savings import saving_costs
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT

MIDDLE, EARLIER = ((0, 0, 2), (0, 2, 4)), ((0, 0, 1), (0, 1, 4))
BUDGET, HOST = 90, 2**40


def _tables(first: float) -> SavingTables:
    """Each block holds 10 bytes and saves 20, twice in the first of two stages: 100 and 60, or 50 and 90 bytes."""
    seconds = [first, 1.0, 25.0, 25.0]
    profile = Profile.from_costs([10] * 4, saved=[20] * 4, forward_time=[each / 2 for each in seconds])
    chain = Chain(((0,), (1,), (2,), (3, ROOT)), (), {})
    rows = saving_costs(profile.blocks, [each / 2 for each in seconds], timeline=profile.timeline, offload=True)
    return SavingTables(
        (Kind((0, 1), BUDGET),),
        chain,
        StageMemory(profile.timeline, chain, 4, micro_batches=2),
        seconds=[np.array(seconds)],
        beside=[0.0],
        arriving=[np.zeros((1, 4, 4))],
        in_flight=lambda left: left,
        width=4,
        savers=[Saver(unit_costs(rows, chain), BUDGET, host_link=1000.0)],
    )


def _middle(tables: SavingTables, seconds: float) -> Cut:
    tables.choose(MIDDLE)
    assert tables.moved(MIDDLE) == 40, "one block of 20 bytes, there and back"
    return Cut((seconds, 1.0), MIDDLE)


def test_a_way_that_takes_hardly_longer_and_copies_nothing_wins() -> None:
    # With two micro-batches 100.5 s and 50.5 for the longest stage, or 51: 0.3 % more.
    tables = _tables(49.5)
    found = copying_less(tables, _middle(tables, 151.0), 2, HOST)
    assert found.path == EARLIER
    assert found.key == (151.0, 1.0), "the key is of the policy, which takes both for equal"


def test_a_way_that_takes_clearly_longer_does_not() -> None:
    # 81 s and 50 for the longest stage, or 51.
    tables = _tables(30.0)
    tables.limit = 131.5
    assert copying_less(tables, _middle(tables, 131.0), 2, HOST).path == MIDDLE
    tables.limit = 132.0
    assert copying_less(tables, _middle(tables, 131.0), 2, HOST).path == EARLIER


@pytest.mark.parametrize("use", [0.9, 1.0])
def test_what_keeps_everything_stays(use: float) -> None:
    tables = _tables(49.5)
    given = Cut((151.5, use), EARLIER)
    assert copying_less(tables, given, 2, HOST) is given
