"""An optimizer step that has failed before it changed anything can be made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobalance.execution.savings.host_optimizer import on_host
from autobalance.strategy.recovery.update_state import UpdateState


class Fails(torch.optim.SGD):
    """Runs out of memory before its first update, if it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise torch.OutOfMemoryError("out of memory")
        return super().step(closure)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("is_given_up", [False, True])
def test_state_on_the_host_survives_a_step_that_failed(is_given_up: bool) -> None:
    near, away = (nn.Parameter(torch.ones(2, device=f"simulated:{index}")) for index in range(2))
    optimizer = Fails([near, away], lr=0.1, momentum=0.9, foreach=False)
    undo = on_host(optimizer, [away])
    for weight in (near, away):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [optimizer.state[weight]["momentum_buffer"] for weight in (near, away)]

    before, optimizer.fails = UpdateState(optimizer), True
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert not before.has_updated
    if is_given_up:
        undo()
    else:
        before.put_back()
    for weight, buffer, found in zip((near, away), kept, optimizer.param_groups[0]["params"], strict=True):
        assert found is weight
        assert optimizer.state[weight]["momentum_buffer"] is buffer
    assert len(optimizer.state) == 2
