from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby, product

import pytest

import autobalance.partitioning.chains.problem as problem_module
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.partitioning.replay import replay
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.timelines.fans import Arrival, Fan


def test_equal_blocks_are_spread_evenly() -> None:
    found = plan(Profile.from_costs([4] * 8), [100] * 4)
    assert found.assignment == (0, 0, 1, 1, 2, 2, 3, 3)
    assert found.peaks == (8, 8, 8, 8)
    assert found.optimal


def test_a_split_that_fills_both_budgets_is_found() -> None:
    assert plan(Profile.from_costs([6, 5, 5, 6]), [11, 11]).peaks == (11, 11)


def test_budgets_a_fraction_too_small_name_both_shortfalls() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(Profile.from_costs([6, 5, 5, 6]), [10.9, 10.9])
    assert caught.value.need == (11, 11)
    assert caught.value.shortfall == (1, 1)
    assert "device 0: needs 11 B, may use 10 B, 1 B missing" in str(caught.value)
    assert "device 1: needs 11 B, may use 10 B, 1 B missing" in str(caught.value)


def test_large_ends_do_not_leave_devices_empty() -> None:
    found = plan(Profile.from_costs([64, *[4] * 12, 64]), [100] * 4)
    assert found.peaks == (64, 24, 24, 64)


@pytest.mark.parametrize("devices", [2, 3, 4, 6, 8])
def test_any_number_of_equal_blocks_is_spread_as_evenly_as_can_be(devices: int) -> None:
    for blocks in range(devices, 49):
        peaks = plan(Profile.from_costs([1] * blocks), [100] * devices).peaks
        assert max(peaks) == -(-blocks // devices), blocks
        assert min(peaks) >= 1, blocks


def test_unequal_devices_are_filled_by_the_same_share() -> None:
    found = plan(Profile.from_costs([4] * 8), [40, 16])
    assert [len(found.blocks_on(device)) for device in (0, 1)] == [6, 2]
    assert found.uses == (0.6, 0.5)


def test_fewer_blocks_than_devices_leave_devices_empty() -> None:
    assert sorted(plan(Profile.from_costs([4, 4]), [10] * 3).peaks) == [0, 4, 4]


@pytest.mark.parametrize(
    ("policy", "peaks"),
    [
        ("auto", (8, 8, 8, 8)),
        ("balanced", (8, 8, 8, 8)),
        ("balanced_low_0", (0, 12, 12, 8)),
        ("minimize_first_gpu_memory", (0, 12, 12, 8)),
        ("sequential", (20, 12, 0, 0)),
    ],
)
def test_each_policy_on_eight_equal_blocks(policy: str, peaks: tuple[int, ...]) -> None:
    assert plan(Profile.from_costs([4] * 8), [20] * 4, policy=policy).peaks == peaks


def test_low_0_takes_what_the_others_cannot_hold() -> None:
    found = plan(Profile.from_costs([4] * 8), [100, 12, 12], policy="balanced_low_0")
    assert found.peaks == (8, 12, 12)
    assert found.root == 0


def test_low_0_keeps_batch_and_loss_on_device_0() -> None:
    blocks = (BlockCost("a"), BlockCost("b"))
    profile = Profile(blocks, Timeline((4, 5, 3), (0, 1, ROOT), (-1,) * 3, (1, 2, 3)))
    found = plan(profile, [10, 10, 10], policy="balanced_low_0")
    assert (found.assignment, found.root, found.peaks) == ((1, 2), 0, (3, 4, 5))
    assert plan(profile, [10, 10]).peaks == (4, 8)


def test_the_root_lives_with_the_last_block() -> None:
    profile = Profile.from_costs([4] * 4)
    assert plan(profile, [10] * 2).root == 1
    assert plan(profile, [100] * 2, policy="sequential").root == 0


def test_max_memory_limits_single_devices_by_position() -> None:
    profile = Profile.from_costs([2**20] * 8)
    found = plan(profile, "2x100MiB", max_memory={1: "2MiB"})
    assert found.budgets == (100 * 2**20, 2 * 2**20)
    # 7 of 100 and 1 of 2 MiB is 50 %, 8 of 100 and none is 8 %: less, although a device stays empty.
    assert found.peaks == (8 * 2**20, 0)


def test_a_pinned_block_is_where_the_user_wants_it() -> None:
    profile = Profile.from_costs([4] * 8)
    found = plan(profile, [100] * 4, pin={"block3": 2})
    assert found.assignment[3] == 2
    # Devices 0 and 1 share blocks 0 to 2 where the order is kept; 2/2/2/2 is possible out of order.
    assert max(found.peaks) == 8


def test_pins_that_contradict_the_call_order_are_honoured_without_giving_up_balance() -> None:
    found = plan(Profile.from_costs([4] * 8), [100] * 4, pin={"block7": 0, "block0": 3})
    assert (found.assignment[7], found.assignment[0]) == (0, 3)
    assert found.peaks == (8, 8, 8, 8)
    assert found.root == 0, "the root stays with the last block, wherever it is"


def test_the_call_order_is_kept_where_leaving_it_gains_little() -> None:
    # In order: 30 + 31 and 30 + 29 on two devices. Out of order block1 could join block3: 60 and 60.
    found = plan(Profile.from_costs([30, 31, 30, 29]), [100, 100], pin={"block1": 0})
    assert found.assignment == (0, 0, 1, 1)


def test_the_call_order_is_not_left_for_a_slower_step() -> None:
    # With block0 alone on its device a step takes 4 % longer, which no room in memory is worth.
    profile = Profile.from_costs([20] * 3, forward_time=[1] * 3, transfer=[6, 6], together=[(1, 2)])
    devices = [Device(name, 100, link=100.0) for name in "ab"]
    found = plan(profile, devices, pin={"block0": 0})
    assert (found.assignment, found.step_time) == ((0, 0, 0), 3.0)
    assert found.optimal


def test_pins_that_leave_no_block_in_the_order_are_planned() -> None:
    found = plan(Profile.from_costs([44, 37]), [100, 100], policy="sequential", pin={"block0": 1, "block1": 0})
    assert found.assignment == (1, 0)


def test_a_batch_is_split_further_than_gains_time_where_nothing_else_fits() -> None:
    profile = Profile.from_costs([10, 10], saved=[640, 640], batch_size=64)
    assert plan(profile, [1000], schedule="1f1b").micro_batches <= 8
    found = plan(profile, [60], schedule="1f1b", recompute=False)
    assert (found.micro_batches, found.peaks) == (32, (60,))


@pytest.mark.parametrize("policy", ["auto", "balanced"])
def test_a_group_that_fits_by_the_replay_alone_has_a_plan(policy: str) -> None:
    # Of two micro-batches, the tables say more of a device that is visited twice than it holds.
    sizes = {"static": (7, 43, 38, 38, 30), "saved": (96, 48, 64, 64, 64), "transient": (8, 40, 0, 32, 24)}
    times = {"forward_time": [1] * 5, "backward_time": [1] * 5}
    profile = Profile.from_costs(**sizes, **times, transfer=(0, 16, 16, 48), together=[(0, 2)], batch_size=2)
    found = plan(profile, [150, 296, 150], policy=policy, schedule="1f1b", micro_batches=2)
    assert found.fits
    assert not found.optimal
    assert max(found.bounds.values()) <= found.value


@pytest.mark.parametrize("group", [(1, 2), (0, 2)])
def test_groups_that_save_memory_together_or_not_at_all_prove_nothing(group: tuple[int, int]) -> None:
    profile = Profile.from_costs([1] * 3, [20] * 3, None, [1] * 3, [1] * 3, [2, 2], together=[group])
    assert plan(profile, [100]).optimal
    found = plan(profile, [50, 50], recompute=True)
    assert not found.optimal
    assert "memory" not in found.bounds


def test_pins_too_large_for_their_device_are_an_error() -> None:
    with pytest.raises(InfeasiblePlanError, match="device 1: needs 12 B, may use 10 B, 2 B missing") as caught:
        plan(Profile.from_costs([6, 6, 1]), [20, 10], pin={"block0": 1, "block1": 1})
    assert "other pins or larger budgets: 1 of these 2 devices would do if each could use 20 B" in str(caught.value)


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        ({"blok3": 0}, "pin names 'blok3', which is not a block; did you mean 'block3'"),
        ({"zzz": 0}, "pin names 'zzz', which is not a block; the blocks are block0, block1"),
        ({"block0": 2}, "device 2; devices are positions in the list of devices, here 0 to 1"),
        ({"block0": "cuda:0"}, "device 'cuda:0'; devices are positions"),
        ({"block0": 0, "block3": 1}, "'block0' on device 0 and 'block3' on device 1, but they must share a device"),
    ],
)
def test_pins_that_mean_nothing_are_refused(pin: dict, text: str) -> None:
    profile = Profile.from_costs([4] * 4, together=[(0, 3)])
    with pytest.raises(ValueError, match=text):
        plan(profile, [10, 10], pin=pin)


def test_a_pinned_loose_tensor_takes_its_user_with_it() -> None:
    blocks = (BlockCost("embed"), BlockCost("head"))
    timeline = Timeline((4, 4, 1), (0, 1, ROOT), (-1,) * 3, (1, 2, 3))
    profile = Profile(blocks, timeline, loose=(("positions", 0), ("loss", ROOT)))
    assert plan(profile, [10, 10], pin={"positions": 1}).assignment[0] == 1
    assert plan(profile, [10, 10], pin={"loss": 0}).root == 0
    with pytest.raises(ValueError, match="pin puts 'positions' on device 0, but 'embed', where it lives, on 1"):
        plan(profile, [10, 10], pin={"embed": 1, "positions": 0})


def test_tied_ends_share_a_device_and_the_rest_stays_balanced() -> None:
    found = plan(Profile.from_costs([4] * 8, together=[(0, 7)]), [100] * 4)
    assert found.assignment[0] == found.assignment[7]
    assert found.peaks == (8, 8, 8, 8)
    assert found.optimal


def test_neighbours_that_must_share_a_device_stay_in_the_chain() -> None:
    found = plan(Profile.from_costs([3, 3, 3, 3], together=[(1, 2)]), [100] * 2)
    assert found.assignment in ((0, 0, 0, 1), (0, 1, 1, 1))


def test_overlapping_groups_become_one() -> None:
    found = plan(Profile.from_costs([1] * 6, together=[(0, 3), (3, 5)]), [100] * 2)
    assert found.assignment[0] == found.assignment[3] == found.assignment[5]


def test_more_groups_than_can_all_be_tried_are_placed_without_claiming_a_proof() -> None:
    groups = [(index, 23 - index) for index in range(10)]
    found = plan(Profile.from_costs([1] * 24, together=groups), [100] * 4)
    assert all(found.assignment[a] == found.assignment[b] for a, b in groups)
    assert not found.optimal
    assert "memory" not in found.bounds
    assert max(found.peaks) <= 8


def _is_visited_once(places: Sequence[int]) -> bool:
    """Whether every device holds consecutive blocks, if any."""
    visits = [place for place, _ in groupby(places)]
    return len(visits) == len(set(visits))


def _valid(profile: Profile, devices: int) -> Iterator[tuple[int, ...]]:
    """Every assignment of the kind that `plan` searches: groups whole, far-apart groups anywhere, the rest in order."""
    far = [group for group in profile.together if max(group) - min(group) >= len(group)]
    chain = [block for block in range(len(profile.blocks)) if not any(block in group for group in far)]
    for assignment in product(range(devices), repeat=len(profile.blocks)):
        whole = all(len({assignment[block] for block in group}) == 1 for group in profile.together)
        if whole and _is_visited_once([assignment[block] for block in chain]):
            yield assignment


@pytest.mark.parametrize("policy", ["balanced", "balanced_low_0"])
@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_beats_the_plan(seed: int, policy: str, random_profile, naive_replay) -> None:
    rng = random.Random(seed)
    blocks, devices = rng.randint(2, 5), rng.randint(1, 3)
    together = [(), [(0, 1)], [(0, blocks - 1)]][rng.randrange(3)] if blocks > 2 else ()
    profile = random_profile(rng, blocks, together)
    budgets = [rng.randint(profile.peak() // (devices + 1), profile.peak()) for _ in range(devices)]

    def key(peaks: Sequence[int]) -> tuple[float, ...]:
        uses = [peak / budget for peak, budget in zip(peaks, budgets, strict=True)]
        if policy == "balanced":
            return max(uses), sum(use**2 for use in uses)
        return uses[0], max(uses[1:], default=0.0)

    best: tuple[float, ...] | None = None
    for assignment in _valid(profile, devices):
        root = 0 if policy == "balanced_low_0" else assignment[-1]
        peaks = naive_replay(profile.timeline, assignment, root, devices)
        if all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)):
            best = key(peaks) if best is None else min(best, key(peaks))
    if best is None:
        with pytest.raises(InfeasiblePlanError):
            plan(profile, budgets, policy=policy)
        return
    found = plan(profile, budgets, policy=policy)
    assert found.optimal
    assert found.fits
    assert list(found.peaks) == naive_replay(profile.timeline, found.assignment, found.root, devices)
    assert key(found.peaks) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_pins_are_honoured_and_never_cost_more_than_the_order(seed: int, random_profile, naive_replay) -> None:
    rng = random.Random(seed)
    blocks, devices = rng.randint(2, 5), rng.randint(2, 3)
    profile = random_profile(rng, blocks)
    budgets = [rng.randint(profile.peak() // 2, profile.peak()) for _ in range(devices)]
    pins = {block: rng.randrange(devices) for block in rng.sample(range(blocks), rng.randint(1, 2))}
    least = {"in order": float("inf"), "any": float("inf")}
    for assignment in product(range(devices), repeat=blocks):
        if any(assignment[block] != device for block, device in pins.items()):
            continue
        if not _is_visited_once([device for block, device in enumerate(assignment) if block not in pins]):
            continue
        peaks = naive_replay(profile.timeline, assignment, assignment[-1], devices)
        use = max(peak / budget for peak, budget in zip(peaks, budgets, strict=True))
        if use <= 1:
            least["any"] = min(least["any"], use)
            if _is_visited_once(assignment):
                least["in order"] = min(least["in order"], use)
    pin = {f"b{block}": device for block, device in pins.items()}
    if least["any"] == float("inf"):
        with pytest.raises(InfeasiblePlanError):
            plan(profile, budgets, pin=pin, policy="balanced")
        return
    found = plan(profile, budgets, pin=pin, policy="balanced")
    assert all(found.assignment[block] == device for block, device in pins.items())
    assert least["any"] <= max(found.uses) <= least["in order"]
    assert max(found.uses) <= least["any"] / 0.95


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_for_every_assignment_and_end_at_the_plan(seed: int, random_profile, naive_replay) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, 5)
    budgets = [rng.randint(profile.peak(), 2 * profile.peak()) for _ in range(3)]
    found = plan(profile, budgets, policy="balanced")
    least = min(
        max(
            peak / budget
            for peak, budget in zip(naive_replay(profile.timeline, places, places[-1], 3), budgets, strict=True)
        )
        for places in product(range(3), repeat=5)
    )
    assert 0 < found.bounds["area"] <= found.bounds["indivisible block"] <= least
    assert found.bounds["indivisible block"] <= found.bounds["memory"] == max(found.uses)


def test_tight_random_chains_always_fit_and_never_exceed_a_budget() -> None:
    rng = random.Random(0)
    for slack in (1.0, 1.1, 1.25, 1.5):
        for _ in range(15):
            devices = rng.randint(2, 4)
            sizes = [rng.randint(1, 16) for _ in range(rng.randint(4, 10))]
            bottleneck = min(
                max(sum(size for size, place in zip(sizes, places, strict=True) if place == d) for d in range(devices))
                for places in product(range(devices), repeat=len(sizes))
                if list(places) == sorted(places)
            )
            budget = int(bottleneck * slack)
            assert max(plan(Profile.from_costs(sizes), [budget] * devices).peaks) == bottleneck


def test_excess_of_an_earlier_plan_is_kept_within_the_budget() -> None:
    profile = Profile.from_costs([4] * 8)
    # Device 0 is known to hold 7 more than the replay says: (4 + 7) / 16 and 28 / 40 is the least.
    found = plan(profile, [16, 40], excess=[7, -3])
    assert found.peaks == (4, 28)
    assert plan(profile, [16, 40]).peaks == (8, 24)
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(profile, [16, 20], excess=[7, 0])
    assert sum(caught.value.need) == 32 + 7
    with pytest.raises(ValueError, match="excess has 1 entries for 2 devices"):
        plan(profile, [16, 40], excess=[1])


def test_the_same_question_gets_the_same_plan() -> None:
    profile = Profile.from_costs([4] * 8)
    first = plan(profile, "2x1KiB")
    assert plan(Profile.from_costs([4] * 8), [1024, 1024]) is first
    again = plan(profile, "2x1KiB", cache=False)
    assert again is not first
    assert again == first


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            {"micro_batches": 4, "schedule": "naive"},
            "micro_batches=4 needs a schedule that splits batches: choose schedule='1f1b'",
        ),
        ({"micro_batches": 0}, "micro_batches=0 does not exist; choose 'auto', a number of parts from 1 on"),
        ({"micro_batches": 4, "schedule": "1f1b"}, "micro_batches=4 needs to know how many samples the batch has"),
        ({"schedule": "zb"}, "schedule='zb' does not exist; choose 'auto', one of 'naive', 'gpipe', '1f1b'"),
        ({"recompute": "always"}, "recompute='always' does not exist; choose 'auto', True or False"),
        ({"policy": "fastest"}, "policy='fastest' does not exist"),
        ({"policy": ["auto"]}, "policy=.* does not exist"),
        ({"excess": [float("nan"), 0]}, "a size in bytes is finite and not negative, not nan"),
        ({"max_memory": {"disk": 8}, "offload": True}, "offload=True takes the host's memory, 'cpu', and no disk"),
    ],
)
def test_options_that_do_not_exist_say_what_does(option: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(Profile.from_costs([1, 1]), [10, 10], **option)


def test_options_by_name_that_exist_are_taken() -> None:
    found = plan(
        Profile.from_costs([1, 1]), [10, 10], micro_batches=1, schedule="naive", recompute=False, offload=False
    )
    assert (found.micro_batches, found.schedule) == (1, "naive")


@pytest.mark.parametrize(
    ("profile", "option", "text"),
    [
        ("a model", {}, "plan takes a Profile, not a str; make one with autobalance.profile"),
        (Profile.from_costs([1, 1]), {"pin": ["block0"]}, "pin is a mapping such as {'head': 0}"),
        (Profile.from_costs([1, 1]), {"max_memory": [1, 2], "offload": True}, "max_memory is a mapping such as"),
        (Profile.from_costs([1, 1]), {"excess": [None, 0]}, "a size is a number of bytes"),
    ],
)
def test_arguments_of_another_type_are_refused_in_words(profile: object, option: dict, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        plan(profile, [10, 10], **option)  # type: ignore[arg-type] # the wrong type is what is tested


def test_groups_that_take_turns_may_leave_the_bounds_without_an_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "MOST_COMBINATIONS", 1)
    profile = Profile.from_costs([4, 7, 3, 9, 3], together=[(1, 3), (0, 4)])
    found = plan(profile, [17, 13], policy="sequential", excess=[0, 3], cache=False)
    assert found.fits
    assert not found.optimal
    assert "memory" not in found.bounds


def test_budgets_are_kept_to_the_byte_at_any_size() -> None:
    profile = Profile.from_costs([2**55, 1])
    assert plan(profile, [2**55 + 1]).peaks == (2**55 + 1,)
    with pytest.raises(InfeasiblePlanError):
        plan(profile, [2**55])
    assert plan(profile, [10**30] * 2).fits, "so large a budget means none"


def _fan_out(blocks: int, rng: random.Random) -> Profile:
    """A tensor of block 0 goes to all others, which hold some bytes of their own; gradients come back in turn."""
    sizes, owners, values, events = [8], [0], [0], [1]

    def born(size: int, owner: int, value: int = -1) -> int:
        sizes.append(size)
        owners.append(owner)
        values.append(value)
        events.append(len(sizes))
        return len(sizes) - 1

    def dies(storage: int) -> None:
        events.append(-(storage + 1))

    given = [0, *(born(8, block, 0) for block in range(1, blocks))]
    saved = [born(rng.randint(1, 30), block) for block in range(blocks)]
    arrivals: list[Arrival] = []
    total = -1
    for block in range(blocks - 1, 0, -1):
        work = born(rng.randint(1, 20), block)
        gradient = born(8, block, block)
        dies(work)
        brought = born(8, 0, block)
        dies(gradient)
        added = born(8, 0) if arrivals else -1
        for old in (total, brought) if arrivals else ():
            dies(old)
        arrivals.append(Arrival(brought, added, given[block], (gradient,), (-1,)))
        total = added if added >= 0 else brought
        dies(saved[block])
    timeline = Timeline(tuple(sizes), tuple(owners), tuple(values), tuple(events), fans=(Fan(tuple(arrivals)),))
    return Profile(tuple(BlockCost(f"b{block}") for block in range(blocks)), timeline)


@pytest.mark.parametrize("seed", range(30))
def test_what_meets_on_a_device_is_within_its_budget_and_optimal_is_said_only_of_the_best(seed, contiguous) -> None:
    rng = random.Random(seed)
    blocks, devices = rng.randint(3, 7), rng.randint(2, 3)
    profile = _fan_out(blocks, rng)
    plans = [
        replay(profile.timeline, assignment, assignment[-1], devices) for assignment in contiguous(blocks, devices)
    ]
    best = min(max(peaks) for peaks in plans)
    found = plan(profile, [max(map(max, plans))] * devices, policy="balanced")
    assert list(found.peaks) == replay(profile.timeline, found.assignment, found.root, devices)
    assert not found.optimal or max(found.peaks) == best
    for budget in range(best - 2, max(map(max, plans))):
        if budget < best:
            with pytest.raises(InfeasiblePlanError, match=r"no plan fits|only some plans were tried"):
                plan(profile, [budget] * devices, policy="balanced")
        else:
            tight = plan(profile, [budget] * devices, policy="balanced")
            assert max(tight.peaks) <= budget
            assert not tight.optimal or max(tight.peaks) == best
