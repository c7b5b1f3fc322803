from __future__ import annotations

import numpy as np

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.savings.saver import Saver, unit_costs
from autobalance.partitioning.savings.saving_tables import SavingTables
from autobalance.partitioning.savings.savings import saving_costs
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT

# All blocks on one device: 30 bytes that stay, and 20 that each saves. Blocks that run again keep none of these.
PROFILE = Profile.from_costs([10] * 3, saved=[20] * 3, forward_time=[1, 2, 4], backward_time=[2, 4, 8], batch_size=1)
CHAIN = Chain(((0,), (1,), (2, ROOT)), (), {})
WHOLE = ((0, 0, 3),)


def _tables(budget: int) -> SavingTables:
    costs = unit_costs(saving_costs(PROFILE.blocks, [1.0, 2.0, 4.0], timeline=PROFILE.timeline), CHAIN)
    return SavingTables(
        (Kind((0,), budget),),
        CHAIN,
        StageMemory(PROFILE.timeline, CHAIN, 3),
        seconds=[np.array([3.0, 6.0, 12.0])],
        beside=[0.0],
        arriving=[np.zeros((1, 3, 3))],
        in_flight=lambda left: 1,
        width=3,
        savers=[Saver(costs, budget, host_link=1.0)],
    )


def test_a_stage_that_fits_keeps_everything() -> None:
    tables = _tables(90)
    assert tables.use(0, 1)[0, 2] == 1.0
    assert tables.time(0, 1)[0, 0, 2] == 21.0
    assert tables.choose(WHOLE) is False
    assert tables.choices(WHOLE) == [None]


def test_a_stage_that_does_not_fit_fills_its_device_and_runs_again_what_takes_least() -> None:
    tables = _tables(70)
    assert tables.use(0, 1)[0].tolist() == [30 / 70, 60 / 70, 1.0]
    assert 21.0 <= tables.time(0, 1)[0, 0, 2] <= 22.0, "a bound until it is asked for"
    assert tables.choose(WHOLE) is True
    assert tables.time(0, 1)[0, 0, 2] == 21.0 + 1.0
    (choice,) = tables.choices(WHOLE)
    assert choice is not None
    assert choice.saving == ("recompute", "keep", "keep")
    assert tables.choose(WHOLE) is False, "nothing new"


def test_a_stage_that_fits_in_no_way_is_out() -> None:
    # 30 bytes that stay, and the 20 of the block whose turn it is.
    assert np.isfinite(_tables(50).use(0, 1)[0, 2])
    tables = _tables(49)
    assert tables.use(0, 1)[0, 2] == np.inf


def test_a_stage_that_held_more_than_it_was_to_saves_more() -> None:
    tables = _tables(70)
    tables.choose(WHOLE)
    tables.savers[0].learn((1, 0, 3), 1)
    assert tables.choose(WHOLE) is True
    (choice,) = tables.choices(WHOLE)
    assert choice is not None
    assert choice.saving == ("recompute", "recompute", "keep")
    assert tables.time(0, 1)[0, 0, 2] == 21.0 + 3.0
