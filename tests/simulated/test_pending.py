"""An error in a backward reaches the user as it was raised, where torch alone would abort the process."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.simulated import fake_elements, simulate

DEVICE = "simulated:0"


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("the user's own")


class MixesShapesInBackward(FailsInBackward):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ gradients[0].new_ones(3, 3)


class TakesTooMuchInBackward(FailsInBackward):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * gradients[0].new_ones(64 * 1024)[0]


class RunsBackwardInBackward(FailsInBackward):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            inner = gradients[0].detach().requires_grad_()
            FailsInBackward.apply(inner * 2).sum().backward()


def loss_through(function: Any) -> tuple[Tensor, Tensor]:
    x = torch.ones(4, 4, device=DEVICE, requires_grad=True)
    return x, function.apply(x * 2).tanh().sum()


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (FailsInBackward, ValueError, "^the user's own$"),
        (MixesShapesInBackward, RuntimeError, "mat1 and mat2 shapes"),
        (RunsBackwardInBackward, ValueError, "^the user's own$"),
    ],
)
def test_error_of_a_backward_is_the_one_that_was_raised(function: Any, error: type[Exception], words: str) -> None:
    _, loss = loss_through(function)
    with pytest.raises(error, match=words) as caught:
        loss.backward()
    assert any(frame.name == "backward" and frame.filename == __file__ for frame in traceback.extract_tb(caught.tb))
    x, loss = loss_through(function)
    with pytest.raises(error, match=words):
        torch.autograd.grad(loss, x)


def test_backward_that_failed_keeps_nothing_and_the_next_one_works() -> None:
    x, loss = loss_through(FailsInBackward)
    held = weakref.ref(x)
    with pytest.raises(ValueError, match="the user's own"):
        loss.backward()
    del x, loss
    gc.collect()
    assert held() is None
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_gradients_of_branches_that_a_failed_backward_did_not_reach_are_freed() -> None:
    gc.collect()
    before = torch.simulated.memory_allocated(0)
    x = torch.ones(4, 4, device=DEVICE, requires_grad=True)
    loss = ((x * 2) @ (x * 3) + FailsInBackward.apply(x * 4)).sum()
    with pytest.raises(ValueError, match="the user's own"):
        loss.backward()
    del x, loss
    gc.collect()
    assert torch.simulated.memory_allocated(0) == before


def test_out_of_memory_in_a_backward_is_an_ordinary_error() -> None:
    with simulate([64 * 1024]):
        _, loss = loss_through(TakesTooMuchInBackward)
        with pytest.raises(torch.OutOfMemoryError, match=r"^simulated:0 out of memory"):
            loss.backward()
        assert torch.simulated.memory_allocated(0) < 64 * 1024


def test_error_in_a_backward_on_fakes_is_the_one_that_was_raised() -> None:
    with fake_elements(FakeTensorMode()):
        _, loss = loss_through(MixesShapesInBackward)
        with pytest.raises(RuntimeError, match="a and b must have same reduction dim"):
            loss.backward()
