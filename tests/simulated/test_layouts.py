"""Gradients of fakes have the strides of real ones, whatever the strides of the input and of what comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.simulated import fake_elements

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": F.instance_norm,
    "log softmax": lambda x: x.log_softmax(1),
    "softmax": lambda x: x.softmax(1),
    "dropout": lambda x: F.dropout(x, 0.5),
    "elu": F.elu,
    "gelu": F.gelu,
    "glu": F.glu,
    "hard swish": F.hardswish,
    "softplus": F.softplus,
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}
INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(2, 3),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
}


def stride_of_gradient(operation: Callable[[Tensor], Tensor], value: Tensor, *, transposed: bool) -> tuple[int, ...]:
    strides: list[tuple[int, ...]] = []
    inner = value.requires_grad_() * 1.0
    inner.register_hook(lambda gradient: strides.append(gradient.stride()))
    result = operation(inner)
    if transposed:
        result = result.transpose(-1, -2)
    result.backward(torch.ones_like(result, memory_format=torch.contiguous_format))
    return strides[0]


@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "through a transpose"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fake_gradient_lies_in_memory_as_a_real_one(name: str, kind: str, transposed: bool) -> None:
    def found(*, fake: bool) -> tuple[int, ...]:
        with fake_elements(FakeTensorMode()) if fake else contextlib.nullcontext():
            value = INPUTS[kind](torch.zeros(2, 4, 8, 8, device="simulated:0")).detach()
            return stride_of_gradient(OPERATIONS[name], value, transposed=transposed)

    assert found(fake=True) == found(fake=False)
