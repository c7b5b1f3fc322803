"""Gradients of activations: one kernel, which makes one storage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autobalance.kernels import activations, norms
from tests.kernels.tracing import operand, trace


@pytest.mark.parametrize("activation", [F.silu, F.mish])
def test_the_gradient_is_one_kernel(activation) -> None:  # type: ignore[no-untyped-def]
    seen = trace("A100-80GB", lambda: activation(operand(1000)))
    before = seen.names.index(activation.__name__)
    gradient = f"{activation.__name__}_backward"
    assert seen.names[before + 1 :].count(gradient) == 1
    assert not {"sigmoid", "mul", "sub", "add"} & set(seen.names)


def test_no_other_operator_is_taken_apart_where_a_gpu_has_a_kernel() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    apart = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and has(name, "CompositeImplicitAutograd")
        and (has(name, "CPU") or has(name, "CUDA"))
    }
    known = {
        func.__name__.partition(".")[0] for func in (*activations.KERNELS_OF_THEIR_OWN, *norms.KERNELS_OF_THEIR_OWN)
    }
    assert apart <= known | {"native_channel_shuffle"}  # whose kernel is the CPU's alone
