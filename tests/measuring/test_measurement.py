"""A profile learns measured times; its bytes stay, with a note wherever the device held something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.measuring.measurement import Measurement, with_measurements
from autobalance.profiling.profile import Profile

KIB = 1024


def profile() -> Profile:
    return Profile.from_costs(
        static=[100 * KIB, 100 * KIB], saved=[40 * KIB, 40 * KIB], transient=[10 * KIB, 10 * KIB], names=["a", "b"]
    )


def as_traced(name: str) -> Measurement:
    return Measurement(
        name,
        forward_time=1.0,
        backward_time=2.0,
        static=100 * KIB,
        saved=40 * KIB,
        forward_peak=150 * KIB,
        backward_peak=150 * KIB,
    )


def test_times_are_replaced_and_bytes_are_not() -> None:
    found = with_measurements(profile(), [as_traced("b")])
    assert [(row.forward_time, row.backward_time) for row in found.blocks] == [(0.0, 0.0), (1.0, 2.0)]
    assert found.timeline == profile().timeline
    assert found.notes == ()


def test_more_than_a_hundredth_above_the_trace_is_told_block_by_block() -> None:
    little = replace(as_traced("a"), saved=40 * KIB + 409)
    assert with_measurements(profile(), [little]).notes == ()
    much = replace(as_traced("a"), saved=41 * KIB, forward_peak=160 * KIB)
    assert with_measurements(profile(), [much, as_traced("b")]).notes == (
        "a took over 1% more than its trace says: saved 41.00 KiB measured, 40.00 KiB traced; forward peak 60.00 KiB "
        "measured, 50.00 KiB traced",
    )


def test_blocks_below_their_traces_are_told_together() -> None:
    pair = [replace(as_traced("a"), saved=20 * KIB), replace(as_traced("b"), saved=30 * KIB)]
    assert with_measurements(profile(), pair).notes == (
        "2 block(s) took over 1% less than their traces say, a most (100%): a trace also counts for a block what glue "
        "and the loss make of its outputs",
    )


def test_tied_blocks_are_not_compared() -> None:
    tied = replace(profile(), together=((0, 1),))
    fewer = replace(as_traced("b"), static=150 * KIB, forward_peak=200 * KIB, backward_peak=200 * KIB)
    assert with_measurements(tied, [fewer]).notes == ()
    assert "static 150.00 KiB measured, 100.00 KiB traced" in with_measurements(profile(), [fewer]).notes[0]


def test_what_a_measurement_notes_is_noted_once() -> None:
    noted = replace(as_traced("a"), notes=("a: half of it",))
    assert with_measurements(profile(), [noted, replace(noted, name="b")]).notes == ("a: half of it",)


def test_a_measurement_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"measured blocks that the profile lacks: c, d; measure the model that was"):
        with_measurements(profile(), [as_traced("d"), as_traced("a"), as_traced("c")])
