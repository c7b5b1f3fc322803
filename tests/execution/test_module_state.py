"""What modules hold is read so that only what a step has changed makes a difference."""

from __future__ import annotations

import weakref

from torch import nn

from autobalance.execution.equivalence.module_state import ModuleState, first_difference


def test_references_made_anew_are_no_difference_and_references_to_something_else_are() -> None:
    net = nn.Module()
    one, other = nn.Linear(1, 1).weight, nn.Linear(1, 1).weight
    state = ModuleState(net)
    net.seen = kept = [weakref.ref(one)]
    before = state.reading(lambda tensor: False)
    net.seen = [weakref.ref(other)]
    assert first_difference(before, state.reading(lambda tensor: False), 0.0) == "seen"
    net.seen = [weakref.ref(one, lambda reference: None)]
    assert net.seen[0] is not kept[0]
    assert first_difference(before, state.reading(lambda tensor: False), 0.0) is None
