"""Time by the roofline, against hand calculation."""

from __future__ import annotations

import pytest
import torch

from autobalance.profiling.work import LAUNCH_TIME, Work, WorkCounter
from autobalance.simulated.dispatch import observing


def test_slower_of_arithmetic_and_traffic_decides() -> None:
    assert Work(flops=100, traffic=10, launches=0).seconds(10.0, 10.0) == 10.0
    assert Work(flops=10, traffic=100, launches=2).seconds(10.0, 10.0) == 10.0 + 2 * LAUNCH_TIME


def test_matrix_product_counts_two_operations_per_element_forward_and_as_many_for_each_gradient() -> None:
    counter = WorkCounter()
    x = torch.ones(8, 16, device="simulated:1")
    weight = torch.ones(16, 32, device="simulated:1", requires_grad=True)
    with observing(counter):
        product = x @ weight
        product.backward(torch.ones(8, 32, device="simulated:1"))
    assert counter.forward[1].flops == counter.backward[1].flops == 2 * 8 * 16 * 32
    assert counter.forward[1].traffic >= 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_views_take_no_time() -> None:
    counter = WorkCounter()
    x = torch.ones(8, 16, device="simulated:1")
    with observing(counter):
        _ = x.t()[2:].unsqueeze(0)
    assert not counter.forward
    assert pytest.approx(0) == sum(work.launches for work in counter.backward.values())
