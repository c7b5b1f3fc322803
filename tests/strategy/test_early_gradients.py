from __future__ import annotations

import torch
from torch import nn

from autobalance.strategy.parts.early_gradients import EarlyGradients


def parameter(gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.ones(1))
    made.grad = torch.tensor([gradient])
    return made


def test_gradients_of_the_last_step_are_there_until_they_are_zeroed() -> None:
    weight = parameter(3.0)
    early = EarlyGradients([weight], are_zeroed=True)
    assert weight.grad is None
    (weight * 2).sum().backward()
    early.set_aside()
    assert weight.grad.tolist() == [3.0]
    weight.grad = None
    early.give_back()
    assert weight.grad.tolist() == [2.0]


def test_gradients_add_up_on_what_earlier_batches_gave_and_wait_where_a_hook_looks() -> None:
    for are_seen, at_the_hook in ((False, 5.0), (True, 3.0)):
        weight = parameter(3.0)
        early = EarlyGradients([weight], are_zeroed=False, are_seen=are_seen)
        (weight * 2).sum().backward()
        early.set_aside()
        assert weight.grad is not None
        assert weight.grad.tolist() == [at_the_hook]
        early.give_back()
        assert weight.grad.tolist() == [5.0]


def test_hooks_change_what_this_batch_adds_and_may_keep_it() -> None:
    weight, kept = parameter(3.0), list[torch.Tensor]()
    early = EarlyGradients([weight], are_zeroed=False, hooks=[[lambda gradient: gradient * 10, kept.append]])
    (weight * 2).sum().backward()
    early.set_aside()
    early.give_back()
    assert weight.grad is not None
    assert (weight.grad.tolist(), kept[0].tolist()) == ([23.0], [20.0])
