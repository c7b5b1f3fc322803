from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.candidate import best_candidate
from autobalance.partitioning.micro_profiles import micro_profile
from autobalance.partitioning.question import Question
from autobalance.profiling.profile import Profile

PROFILE = Profile.from_costs(
    [10, 10], saved=[35, 35], forward_time=[2, 2], backward_time=[3, 3], transfer=[25], batch_size=1
)
DEVICES = (Device("a", 100, link=10.0), Device("b", 100, link=10.0))
QUESTION = Question(PROFILE, DEVICES, (100, 100), "auto", excess=(0, 0))


def test_a_part_of_a_batch_has_its_share_of_the_samples_rounded_up() -> None:
    profile = Profile.from_costs([10, 10], saved=[50, 100], batch_size=5)
    part = micro_profile(profile, 2)
    assert part.batch_size == 3
    assert part.peak() == 20 + 30 + 60
    assert micro_profile(profile, 1) is profile


def test_a_batch_of_which_nobody_knows_the_samples_cannot_be_split() -> None:
    with pytest.raises(
        ValueError, match=r"micro_batches=2 needs to know how many samples .*scalable=True.*batch_size="
    ):
        micro_profile(Profile.from_costs([10, 10]), 2)


def test_the_fastest_is_found_and_the_lightest_within_a_given_time() -> None:
    # All on one device takes 10 s and fills 90 % of it; on two, five more to send 25 bytes there and back.
    _, fastest = best_candidate(QUESTION, "naive", 1)
    assert fastest is not None
    assert fastest.key == (10.0, pytest.approx(0.9))
    assert fastest.proved
    _, lightest = best_candidate(QUESTION, "naive", 1, limit=15.0)
    assert lightest is not None
    assert sorted(lightest.judged.peaks) == [45, 45]
    assert lightest.judged.seconds == 15.0


def test_what_devices_are_known_to_hold_beyond_a_replay_has_to_fit_as_well() -> None:
    problem, found = best_candidate(replace(QUESTION, excess=(0, 11), policy="sequential"), "naive", 1)
    assert found is not None
    assert found.judged.peaks == (90, 0)
    problem, found = best_candidate(replace(QUESTION, excess=(11, 11)), "naive", 1)
    assert found is not None
    assert found.key[1] == pytest.approx(0.56), "45 bytes and 11 more"
    problem, found = best_candidate(replace(QUESTION, excess=(60, 60)), "naive", 1)
    assert found is None
    assert problem.budgets == (100, 100)
