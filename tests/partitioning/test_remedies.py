from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.words import parse_devices
from autobalance.partitioning.question import Question
from autobalance.partitioning.remedies import remedies
from autobalance.profiling.profile import Profile

# On two devices, two blocks each take 20 + 40 bytes of 50.
PROFILE = Profile.from_costs([10] * 4, saved=[20] * 4, batch_size=4)
QUESTION = Question(PROFILE, parse_devices([50, 50]), (50, 50), "balanced", excess=(0, 0), schedules=("naive",))


def _words(question: Question) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in remedies(question))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autobalance.partitioning.remedies.host_budget", lambda given: 2**20)


@pytest.mark.usefixtures("host")
def test_every_option_that_helps_is_told_with_the_plan_it_gives() -> None:
    words = _words(QUESTION)
    # Of two micro-batches, two of 10 bytes for each block are in flight; of four, two of 5: 20 + 2 * 10 bytes.
    assert list(words) == ["schedule='1f1b', micro_batches=4", "recompute=True", "offload=True"]
    assert words["schedule='1f1b', micro_batches=4"] == "every device would use 80% of its budget at most"
    assert "of 4 blocks recompute" in words["recompute=True"]
    assert "of 4 blocks offload what they save" in words["offload=True"]


@pytest.mark.usefixtures("host")
def test_what_is_allowed_already_is_not_told_again() -> None:
    tight = replace(QUESTION, budgets=(35, 35))  # where two blocks of 20 + 20 bytes fit in no way
    assert "recompute=True" not in _words(replace(tight, recompute=True))
    asked = replace(QUESTION, schedules=("1f1b",), micro_batches=(2,))
    assert not any(name.startswith("schedule") for name in _words(asked))


@pytest.mark.usefixtures("host")
def test_nothing_is_told_where_nothing_helps() -> None:
    assert _words(replace(QUESTION, budgets=(5, 5))) == {}


@pytest.mark.usefixtures("host")
def test_a_batch_that_is_not_known_is_not_split() -> None:
    profile = Profile.from_costs([10] * 4, saved=[20] * 4)
    assert list(_words(replace(QUESTION, profile=profile))) == ["recompute=True", "offload=True"]


def test_host_memory_that_is_missing_is_said_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autobalance.partitioning.remedies.host_budget", lambda given: 0)
    (line,) = [line for line in remedies(QUESTION) if "host memory" in line]
    assert line.startswith("offload=True with more host memory: ")
    assert "0 B may be used" in line
    assert "(max_memory={'cpu': " in line
