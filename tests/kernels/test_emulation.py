"""Kernels are chosen for fakes only, by the device of the tensors, and by whoever calls the operation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.kernels.emulation import emulating, target_of
from autobalance.kernels.table import EFFICIENT_GROUPED
from autobalance.kernels.target import find_target
from autobalance.kernels.versions import assuming, release
from autobalance.simulated import fake_elements, simulate

A100, V100 = find_target("A100-80GB"), find_target("V100-16GB")


def attended(device: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Name of the autograd node of an attention."""
    query = torch.empty(2, 4, 64, 64, dtype=dtype, device=device, requires_grad=True)
    return type(F.scaled_dot_product_attention(query, query, query).grad_fn).__name__


def test_box_of_different_gpus_chooses_for_each() -> None:
    with (
        simulate(2),
        fake_elements(FakeTensorMode()),
        emulating({0: A100, 1: V100}, "PrivateUse1"),
    ):
        assert "FlashAttention" in attended("simulated:0")
        assert "Attention" not in attended("simulated:1")
    assert target_of({0: A100, 1: V100}, 1) is V100
    assert target_of(A100, 1) is A100


def test_real_numbers_keep_their_kernels() -> None:
    value = torch.randn(2, 4, 8, 16)
    with simulate(1), emulating(A100, "PrivateUse1"):
        there: Tensor = value.to("simulated:0")
        attention = F.scaled_dot_product_attention(there, there, there).cpu()
        normed = F.rms_norm(there, (16,)).cpu()
    assert torch.allclose(attention, F.scaled_dot_product_attention(value, value, value), atol=1e-6)
    assert torch.allclose(normed, F.rms_norm(value, (16,)), atol=1e-6)


def test_callers_in_python_modules_and_in_torchs_own_code_see_the_same_choice() -> None:
    with simulate(1), fake_elements(FakeTensorMode()), emulating(A100, "PrivateUse1"):
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="simulated:0")
        result = layer(torch.empty(2, 10, 64, device="simulated:0"))
        nodes, names = [result.grad_fn], set()
        while nodes:
            node = nodes.pop()
            names.add(type(node).__name__)
            nodes.extend(parent for parent, _ in node.next_functions if parent is not None)
    assert "ScaledDotProductEfficientAttentionBackward0" in names


def test_an_error_inside_takes_the_kernels_back_too() -> None:
    with simulate(1), fake_elements(FakeTensorMode()):
        with pytest.raises(ZeroDivisionError), emulating(A100, "PrivateUse1"):
            raise ZeroDivisionError
        assert "Attention" not in attended("simulated:0")


def test_another_release_of_torch_can_be_assumed() -> None:
    with assuming((2, 13)):
        assert release() == (2, 13)
        assert not EFFICIENT_GROUPED.value(A100, release())
    assert release() == tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch, with or without a GPU")
def test_fakes_that_are_on_cuda_choose_alike() -> None:
    for target, node in ((A100, "Flash"), (find_target("H100-80GB"), "Cudnn"), (V100, "ToCopy")):
        with emulating(target, "CUDA"), FakeTensorMode():
            assert node in attended("cuda")
