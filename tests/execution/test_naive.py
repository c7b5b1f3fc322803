"""The naive schedule runs a step once, whole, inside the glue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autobalance.execution.naive import NaiveSchedule

log: list[str] = []


@contextmanager
def glue() -> Iterator[None]:
    log.append("glue on")
    try:
        yield
    finally:
        log.append("glue off")


@pytest.fixture(autouse=True)
def empty_log() -> None:
    log.clear()


def test_a_step_runs_once_inside_the_glue_and_its_result_is_returned() -> None:
    def step(batch: int, *, batch_idx: int) -> int:
        log.append(f"step {batch} {batch_idx}")
        return batch + batch_idx

    assert NaiveSchedule(glue).run(step, 3, batch_idx=4) == 7
    assert log == ["glue on", "step 3 4", "glue off"]


def test_the_glue_is_off_after_a_step_that_fails() -> None:
    def step() -> None:
        raise KeyError("the user's own error")

    with pytest.raises(KeyError, match="the user's own error"):
        NaiveSchedule(glue).run(step)
    assert log == ["glue on", "glue off"]
