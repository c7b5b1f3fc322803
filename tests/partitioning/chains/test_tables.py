from __future__ import annotations

import numpy as np
import pytest

from autobalance.partitioning.chains.chain import Chain
from autobalance.partitioning.chains.kinds import Kind
from autobalance.partitioning.chains.stage_memory import StageMemory
from autobalance.partitioning.chains.stage_peaks import Reach
from autobalance.partitioning.chains.tables import Tables, in_flight_of
from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import ROOT
from autobalance.schedules.launches import in_flight, launch_order

PROFILE = Profile.from_costs([1, 2, 4])
CHAIN = Chain(((0,), (1,), (2, ROOT)), (), {})
INFINITE = np.inf


def _tables(*kinds: Kind, chain: Chain = CHAIN, **given: object) -> Tables:
    settings: dict[str, object] = {
        "seconds": [np.array([1.0, 2.0, 4.0]) for _ in kinds],
        "beside": [0.0 for _ in kinds],
        "arriving": [np.zeros((1, 3, 3)) for _ in kinds],
        "in_flight": lambda left: 1,
        "width": 3,
    }
    return Tables(kinds, chain, StageMemory(PROFILE.timeline, chain, 3), **{**settings, **given})  # type: ignore[arg-type]


def test_micro_batches_in_flight_follow_the_schedule() -> None:
    lefts = range(1, 5)
    assert [in_flight_of("naive", 3)(left) for left in lefts] == [1, 1, 1, 1]
    assert [in_flight_of("gpipe", 3)(left) for left in lefts] == [3, 3, 3, 3]
    assert [in_flight_of("1f1b", 3)(left) for left in lefts] == [1, 2, 3, 3]
    assert [in_flight_of("looped", 3)(left) for left in lefts] == [3, 3, 3, 3]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_as_many_are_in_flight_as_the_launches_of_a_schedule_leave(schedule: str, micro_batches: int) -> None:
    for stages in range(1, 5):
        launched = in_flight(launch_order(schedule, stages, micro_batches), stages)
        assert [in_flight_of(schedule, micro_batches)(stages - at) for at in range(stages)] == list(launched)


def test_uses_are_peaks_by_budget_and_infinite_above_it_and_beyond_the_chain() -> None:
    uses = _tables(Kind((0,), 6)).use(0, 1)
    assert uses.tolist() == [[1 / 6, 3 / 6, INFINITE], [2 / 6, 1.0, INFINITE], [4 / 6, INFINITE, INFINITE]]
    loose = _tables(Kind((0,), 6), hard=False).use(0, 1)
    assert loose[0].tolist() == [1 / 6, 3 / 6, 7 / 6]
    assert loose[2].tolist() == [4 / 6, INFINITE, INFINITE]


def test_what_a_device_holds_beyond_the_replay_counts_where_it_holds_something() -> None:
    tables = _tables(Kind((0,), 6, excess=2))
    assert tables.use(0, 1)[0].tolist() == [3 / 6, 5 / 6, INFINITE]
    assert tables.base(0) == 0.0


def test_what_replays_found_is_added_to_the_stage_on_its_kind_with_as_many_in_flight() -> None:
    kinds = Kind((0,), 10), Kind((1,), 10, excess=1)
    tables = _tables(*kinds, in_flight=lambda left: left, known={(0, 2, 0, 2): 5})
    assert tables.use(0, 2)[0].tolist() == [1 / 10, 8 / 10, 7 / 10]
    assert tables.use(0, 1)[0].tolist() == [1 / 10, 3 / 10, 7 / 10]
    assert tables.use(1, 2)[0, 1] == 4 / 10


def test_only_the_kind_that_a_unit_is_bound_to_may_hold_it_and_only_with_it() -> None:
    bound = Chain(CHAIN.units, (), {1: 0})
    tables = _tables(Kind((0,), 10, units=(1,)), Kind((1, 2), 10), chain=bound)
    assert tables.allowed(0).tolist() == [[False, True, True], [True, True, False], [False, False, False]]
    assert tables.allowed(1).tolist() == [[True, False, False], [False, False, False], [True, False, False]]


def test_stages_out_of_reach_are_not_allowed() -> None:
    tables = _tables(Kind((0,), 10), reach=Reach.of([2, 2, 3]), width=2, arriving=[np.zeros((1, 3, 2))])
    assert tables.allowed(0).tolist() == [[True, True], [True, False], [True, False]]


def test_seconds_are_those_of_the_units_with_what_arrives_and_lies_beside() -> None:
    arriving = np.arange(9.0).reshape(1, 3, 3)
    tables = _tables(Kind((0,), 10), arriving=[arriving], beside=[100.0])
    assert tables.time(0, 1)[0, 0].tolist() == [101.0, 104.0, 109.0]
    assert tables.time(0, 1)[0, 1, :2].tolist() == [105.0, 110.0]
    assert tables.shortest == 101.0
    assert tables.time_by_length(0, 1)[2, 0, 0] == 109.0
    assert tables.use_by_length(0, 1)[1, 0] == 3 / 10
