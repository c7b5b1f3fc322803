"""Launch orders against what each device has to do by the schedules' definitions."""

from __future__ import annotations

import pytest

from autobalance.schedules.launches import SCHEDULES, Launch, in_flight, launch_order

SIZES = [(stages, number) for stages in (1, 2, 3, 4, 8) for number in range(1, 4 * stages + 1)]


def of_stage(order: tuple[Launch, ...], stage: int) -> str:
    """What a stage does, as `F0 F1 B0 B1`."""
    return " ".join(
        f"{'B' if launch.backward else 'F'}{launch.micro_batch}" for launch in order if launch.stage == stage
    )


def one_forward_one_backward(stage: int, stages: int, number: int) -> str:
    """The definition: warm up with a forward for each later stage, then take turns, then drain."""
    warm = min(number, stages - stage - 1)
    words = [f"F{k}" for k in range(warm)]
    for k in range(number - warm):
        words += [f"F{warm + k}", f"B{k}"]
    return " ".join([*words, *(f"B{k}" for k in range(number - warm, number))])


def comes_after_its_needs(order: tuple[Launch, ...], stages: int) -> bool:
    seen: set[tuple[int, int, bool]] = set()
    for launch in order:
        stage, number = launch.stage, launch.micro_batch
        needs = {(stage, number, False)} if launch.backward else set()
        if launch.backward and stage + 1 < stages:
            needs.add((stage + 1, number, True))
        if not launch.backward and stage:
            needs.add((stage - 1, number, False))
        if not needs <= seen or (stage, number, launch.backward) in seen:
            return False
        seen.add((stage, number, launch.backward))
    return True


def test_1f1b_is_the_textbooks_on_every_stage() -> None:
    for stages, number in SIZES:
        order = launch_order("1f1b", stages, number)
        for stage in range(stages):
            assert of_stage(order, stage) == one_forward_one_backward(stage, stages, number), (stages, number, stage)
        assert in_flight(order, stages) == tuple(min(number, stages - stage) for stage in range(stages))


def test_gpipe_goes_forward_with_all_and_back_from_the_last() -> None:
    for stages, number in SIZES:
        order = launch_order("gpipe", stages, number)
        words = [*(f"F{k}" for k in range(number)), *(f"B{k}" for k in reversed(range(number)))]
        assert {of_stage(order, stage) for stage in range(stages)} == {" ".join(words)}
        assert in_flight(order, stages) == (number,) * stages


def test_naive_has_one_micro_batch_at_a_time() -> None:
    order = launch_order("naive", 3, 2)
    assert [of_stage(order, stage) for stage in range(3)] == ["F0 B0 F1 B1"] * 3
    assert [launch.stage for launch in order] == [0, 1, 2, 2, 1, 0] * 2
    assert in_flight(order, 3) == (1, 1, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_launched_before_what_it_needs(schedule: str, training: bool) -> None:
    for stages, number in SIZES:
        for devices in (range(stages), [stage % 3 for stage in range(stages)], [0] * stages):
            order = launch_order(schedule, stages, number, devices=tuple(devices), training=training)
            assert comes_after_its_needs(order, stages)
            assert len(order) == stages * number * (2 if training else 1)
            assert any(launch.backward for launch in order) == training


def test_on_a_loop_groups_of_as_many_as_devices_go_round_after_round() -> None:
    order = launch_order("looped", 4, 4, devices=[0, 1, 0, 1], training=False)
    device_0 = [(launch.stage, launch.micro_batch) for launch in order if launch.stage in (0, 2)]
    assert device_0 == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    trained = launch_order("looped", 4, 4, devices=[0, 1, 0, 1])
    back = [(launch.stage, launch.micro_batch) for launch in trained[16:] if launch.stage in (0, 2)]
    assert trained[:16] == order
    assert back == device_0[::-1]
    assert in_flight(trained, 4) == (4, 4, 4, 4)


def test_folded_stages_take_turns_on_the_device_where_the_fold_is() -> None:
    order = launch_order("looped", 4, 3, devices=[0, 1, 1, 0], training=False)
    at_the_fold = [(launch.stage, launch.micro_batch) for launch in order if launch.stage in (1, 2)]
    assert at_the_fold == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]


def test_without_backwards_micro_batches_go_one_by_one_and_hold_nothing() -> None:
    for schedule in ("naive", "gpipe", "1f1b"):
        order = launch_order(schedule, 2, 2, training=False)
        assert [(launch.stage, launch.micro_batch) for launch in order] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        assert in_flight(order, 2) == (1, 1)


def test_what_cannot_be_launched_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule='zero bubble' does not exist; choose one of 'naive', 'gpipe'"):
        launch_order("zero bubble", 2, 2)
    with pytest.raises(ValueError, match="0 stages and 2 micro-batches leave nothing to launch"):
        launch_order("1f1b", 0, 2)
    with pytest.raises(ValueError, match="say the device of each stage as devices="):
        launch_order("looped", 4, 2)
    with pytest.raises(ValueError, match="devices has 2 entries for 4 stages"):
        launch_order("looped", 4, 2, devices=[0, 1])
