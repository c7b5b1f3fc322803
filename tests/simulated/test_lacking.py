from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.simulated import fake_elements


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_integers_are_counted_as_on_cuda(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 2, 2, 3, 3, 3], dtype=dtype)
    counts = torch.histc(values.to("simulated:1"), bins=4, min=0, max=3)
    assert counts.device == torch.device("simulated", 1)
    assert counts.dtype == dtype
    assert counts.tolist() == [1, 0, 2, 3]


def test_a_trace_counts_integers_too() -> None:
    with fake_elements(FakeTensorMode(allow_non_fake_inputs=True)):
        counts = torch.histc(torch.zeros(2, dtype=torch.int32, device="simulated:0"), bins=4, min=0, max=3)
    assert (counts.shape, counts.dtype) == (torch.Size([4]), torch.int32)
