"""Fakes of results have storages as large as real results, for kernels that leave more than the shape says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.simulated import fake_elements

DEVICE = "simulated:0"
Operation = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Operation] = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "soft margin": F.soft_margin_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary cross entropy with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl divergence": lambda x, y: F.kl_div(x, y.sigmoid(), reduction="batchmean"),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "multi margin": lambda x, y: F.multi_margin_loss(x, y.argmax(1)),
    "multilabel margin": lambda x, y: F.multilabel_margin_loss(x, y.argsort(1)),
    "poisson": F.poisson_nll_loss,
    "cosine embedding": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
    "triplet margin": lambda x, y: F.triplet_margin_loss(x, y, y * 2),
}
OTHERS: dict[str, Operation] = {
    "unfold": lambda x, y: F.unfold(x[None, None], 9),
    "fold": lambda x, y: F.fold(x.reshape(1, 4, -1), (32, 32), 2, stride=2),
    "product of groups of rows": lambda x, y: F.grouped_mm(
        x, y.view(2, 8, 64).transpose(1, 2), offs=torch.tensor([4, 16], dtype=torch.int32, device=x.device)
    ).square(),
    "embedding bag": lambda x, y: F.embedding_bag(y.argsort(1)[:, :128], torch.cat([x, y]).t()),
    "embedding bag that knows its end": lambda x, y: F.embedding_bag(
        torch.arange(32, device=x.device) % 16, x, torch.arange(0, 33, 8, device=x.device), include_last_offset=True
    ),
    "connectionist temporal classification": lambda x, y: F.ctc_loss(
        x[:, None].log_softmax(2), torch.ones(1, 5, dtype=torch.long, device=x.device), (16,), (5,)
    ),
    "the same with lengths as tensors": lambda x, y: F.ctc_loss(
        x[:, None].log_softmax(2),
        torch.ones(1, 5, dtype=torch.long, device=x.device),
        torch.tensor([16], device=x.device),
        torch.tensor([5], device=x.device),
    ),
    "max unpool": lambda x, y: F.max_unpool2d(*F.max_pool2d(x[None], 2, return_indices=True), 2),
    "tensor from a list": lambda x, y: x * torch.tensor([1.0, 2.0], device=x.device)[:, None, None],
}


def storages_of(operation: Operation) -> list[int]:
    """Bytes of the result and of the gradient, the peak, and the bytes of each tensor kept for the backward."""
    torch.manual_seed(0)
    x, y = (torch.randn(16, 64).to(DEVICE) for _ in range(2))
    saved: list[int] = []

    def pack(tensor: Any) -> Any:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    torch.simulated.reset_peak_memory_stats(0)
    before = torch.simulated.memory_allocated(0)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = operation(x, y)
    result.sum().backward()
    assert x.grad is not None
    peak = torch.simulated.max_memory_allocated(0) - before
    return [result.untyped_storage().nbytes(), x.grad.untyped_storage().nbytes(), peak, *saved]


@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_storages_of_fakes_are_those_of_real_numbers(name: str) -> None:
    operation = (LOSSES | OTHERS)[name]
    real = storages_of(operation)
    with fake_elements(FakeTensorMode()):
        fake = storages_of(operation)
    assert fake == real


@pytest.mark.parametrize("name", ["mse", "smooth l1", "binary cross entropy", "soft margin"])
def test_reduced_loss_keeps_what_it_was_computed_in(name: str) -> None:
    with fake_elements(FakeTensorMode()):
        assert storages_of(LOSSES[name])[0] == 16 * 64 * 4
