from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.words import parse_devices
from autobalance.partitioning.question import Question, counts_in, schedules_in
from autobalance.partitioning.savings.saver import Allowed
from autobalance.partitioning.search import plan
from autobalance.profiling.profile import Profile

PROFILE = Profile.from_costs([4, 4, 4], saved=[10, 10, 10], batch_size=10)
QUESTION = Question(PROFILE, parse_devices([100, 80]), (100, 80), "auto", excess=(0, 3))


def test_auto_asks_for_all_schedules() -> None:
    assert schedules_in("auto") == ("naive", "gpipe", "1f1b", "looped")
    assert schedules_in("1f1b") == ("1f1b",)
    assert schedules_in(["gpipe", "looped"]) == ("gpipe", "looped")


@pytest.mark.parametrize("schedule", ["zigzag", ["1f1b", "zigzag"], [], None])
def test_schedules_that_do_not_exist_say_which_do(schedule: str | list[str]) -> None:
    with pytest.raises(ValueError, match=r"does not exist; choose 'auto', one of 'naive', 'gpipe', '1f1b', 'looped'"):
        schedules_in(schedule)


def test_numbers_of_parts_are_taken_in_order_and_once() -> None:
    assert counts_in("auto", ["1f1b"], 8) == ()
    assert counts_in(4, ["1f1b"], 8) == (4,)
    assert counts_in([4, 2, 4], ["1f1b"], 8) == (2, 4)
    assert counts_in(1, ["naive"], 8) == (1,)
    assert counts_in(64, ["1f1b"], 0) == (64,), "the batch is not known"


@pytest.mark.parametrize("given", ["many", 0, -1, True, [], [2, 0], [1.5], 1.0, None])
def test_numbers_that_no_batch_has_are_refused(given: object) -> None:
    with pytest.raises(
        ValueError, match=r"micro_batches=.* does not exist; choose 'auto', a number of parts from 1 on"
    ):
        counts_in(given, ["1f1b"], 8)  # type: ignore[arg-type]


def test_parts_need_a_schedule_that_takes_them_and_a_batch_that_has_them() -> None:
    with pytest.raises(ValueError, match=r"micro_batches=4 needs a schedule that splits batches: choose .*'1f1b'"):
        counts_in(4, ["naive"], 8)
    with pytest.raises(ValueError, match=r"micro_batches=\[2, 9\]: a batch of 8 samples has no 9 parts"):
        counts_in([2, 9], ["1f1b"], 8)


def test_a_batch_is_split_into_parts_of_every_size_but_no_more_parts_than_that_takes() -> None:
    # Ten samples make parts of 10, 5, 4, 3, 2 and 1: in 1, 2, 3, 4, 5 and 10 parts.
    asked = replace(QUESTION, schedules=("naive", "1f1b"))
    assert list(asked.splits) == [("naive", 1), ("1f1b", 2), ("1f1b", 3), ("1f1b", 4), ("1f1b", 5), ("1f1b", 10)]
    assert next(replace(asked, schedules=("1f1b",)).splits) == ("1f1b", 1), "as a whole, where nothing else does so"


def test_given_numbers_are_tried_with_every_schedule_that_splits() -> None:
    asked = replace(QUESTION, schedules=("1f1b", "naive", "gpipe"), micro_batches=(1, 4))
    assert list(asked.splits) == [("naive", 1), ("1f1b", 4), ("gpipe", 4)]
    assert list(replace(asked, micro_batches=(4,)).splits) == [("1f1b", 4), ("gpipe", 4)]


def test_finer_parts_are_half_as_large_each_time_down_to_a_sample() -> None:
    profile = Profile.from_costs([4, 4, 4], saved=[10, 10, 10], batch_size=100)
    asked = replace(QUESTION, profile=profile, schedules=("naive", "1f1b", "gpipe"))
    # Of 16 parts for two devices the largest has seven samples.
    assert list(asked.finer_splits) == [[("1f1b", count), ("gpipe", count)] for count in (34, 100)]
    assert not list(replace(asked, micro_batches=(2,)).finer_splits), "other numbers were asked for"
    assert not list(replace(asked, schedules=("naive",)).finer_splits)
    assert not list(replace(QUESTION, schedules=("1f1b",)).finer_splits), "ten parts have one sample already"


def test_of_a_batch_that_is_not_known_there_is_one_part() -> None:
    asked = replace(QUESTION, profile=Profile.from_costs([4, 4]), schedules=("1f1b",))
    assert list(asked.splits) == [("1f1b", 1)]


def test_blocks_may_do_what_is_allowed() -> None:
    assert QUESTION.allowed is None
    assert replace(QUESTION, recompute=None).allowed == Allowed(recompute=True)
    assert replace(QUESTION, recompute=None).without_recomputing.allowed is None
    assert replace(QUESTION, recompute=True).allowed == Allowed(recompute=True)
    assert replace(QUESTION, offload=True, host_memory=7).allowed == Allowed(offload=True, host_memory=7)


def test_a_question_can_be_asked_again_in_the_words_of_plan() -> None:
    asked = replace(QUESTION, policy="balanced", pins=((1, 1),), recompute=True, offload=True, host_memory=5)
    again = plan(PROFILE, **asked.arguments)
    assert again.question == asked.arguments
    assert (again.assignment[1], again.budgets, again.policy) == (1, (100, 80), "balanced")
