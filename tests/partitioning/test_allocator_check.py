from __future__ import annotations

import pytest

from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.allocator_check import most_reserved
from autobalance.partitioning.budgets import ALLOWANCE, budgets_of
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import Timeline

MIB = 2**20

# The second tensor takes 60 MiB of the 100 MiB that the first has left, and the third does not fit into the 40 MiB
# beside it: 140 MiB are in use at most, but 180 MiB are taken from the device.
IN_PIECES = Timeline(
    sizes=(100 * MIB, 60 * MIB, 80 * MIB),
    owners=(0, 0, 1),
    values=(-1,) * 3,
    events=(1, -1, 2, 3),
)


def profile(target: str = "cuda", granule: int = 512) -> Profile:
    return Profile((BlockCost("first"), BlockCost("second")), IN_PIECES, target=target, granule=granule)


def devices(count: int, room: int, *, real: bool = True) -> list[Device]:
    return [Device(f"cuda:{index}", ALLOWANCE + room, real=real) for index in range(count)]


def sequential(count: int, room: int, *, real: bool = True, of: Profile | None = None):
    found = devices(count, room, real=real)
    return plan(of or profile(), found, policy="sequential", reserve=ALLOWANCE, cache=False)


def test_a_plan_whose_memory_falls_into_pieces_is_left_out_and_the_next_one_found() -> None:
    assert sequential(2, 180 * MIB).assignment == (0, 0)
    found = sequential(2, 160 * MIB)
    assert found.assignment == (0, 1)
    assert found.peaks == (100 * MIB, 80 * MIB)
    assert not found.optimal
    assert found.notes == (
        "plans whose tensors fit were left out, as the caching allocator of device 0 would run out: free memory lies "
        "in pieces that are too small, which PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins",
    )


def test_settings_of_the_allocator_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = sequential(2, 160 * MIB)
    assert (found.assignment, found.notes) == ((0, 0), ())


@pytest.mark.parametrize(
    "options",
    [{"real": False}, {"of": profile("by hand")}, {"of": profile("simulated", granule=1)}],
    ids=["device", "costs", "target"],
)
def test_only_allocators_that_will_be_there_are_asked(options) -> None:
    assert sequential(2, 160 * MIB, **options).assignment == (0, 0)


def test_where_no_plan_can_be_served_the_error_says_what_joins_the_pieces() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        sequential(1, 160 * MIB)
    assert caught.value.shortfall == (20 * MIB,)
    told = str(caught.value)
    assert told.startswith("no plan was found that CUDA's caching allocators can serve: free memory lies in pieces")
    assert "device 0 (cuda:0): needs 180.00 MiB, may use 160.00 MiB, 20.00 MiB missing" in told
    assert "devices would do" not in told  # by bytes alone they would
    assert "  - PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment" in told


def test_what_is_known_above_the_replay_is_not_the_allocators() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(profile(), devices(1, 164 * MIB), reserve=ALLOWANCE, excess=[4 * MIB])
    assert caught.value.shortfall == (20 * MIB,)


@pytest.mark.parametrize("reserve", ["auto", 0, "1GiB"])
def test_pieces_may_take_what_a_budget_keeps_for_them_and_never_what_libraries_need(reserve) -> None:
    device = Device("cuda:0", 80 * 2**30, real=True)
    (budget,) = budgets_of([device], reserve=reserve)
    assert budget <= most_reserved(device, budget) <= max(budget, 80 * 2**30 - ALLOWANCE)
    (held,) = budgets_of([device], {0: "10GiB"}, reserve)
    assert most_reserved(device, held) <= (10 * 2**30 - ALLOWANCE if reserve == "auto" else held / 0.95)
