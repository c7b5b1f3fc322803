"""Calls of blocks in a deeper model, against a trace of it."""

from __future__ import annotations

from autobalance.timelines.calls import Call
from autobalance.timelines.splice import repeated
from tests.timelines.test_splice import profile_of


def test_copies_of_a_block_are_called_as_those_of_the_deep_model() -> None:
    def in_order(call: Call) -> tuple[int, int]:
        return call.start, call.block

    deep = profile_of(6, "SGD").timeline.calls
    made = repeated(profile_of(3, "SGD"), "layers.1", 3).timeline.calls
    assert {call.block for call in deep} == set(range(8))
    assert sorted(made, key=in_order) == sorted(deep, key=in_order)
