"""Counted work, against hand calculation."""

from __future__ import annotations

import torch

from autobalance.profiling.work import WorkCounter
from autobalance.simulated.dispatch import observing


def flops(counter: WorkCounter, phase: str) -> int:
    return sum(part.flops for part in counter.work(phase, account=1))  # type: ignore[arg-type]  # one of the phases


def test_matrix_product_counts_two_operations_per_element_forward_and_as_many_for_each_gradient() -> None:
    counter = WorkCounter()
    x = torch.ones(8, 16, device="simulated:1")
    weight = torch.ones(16, 32, device="simulated:1", requires_grad=True)
    with observing(counter):
        product = x @ weight
        product.backward(torch.ones(8, 32, device="simulated:1"))
    assert flops(counter, "forward") == flops(counter, "backward") == 2 * 8 * 16 * 32
    traffic = sum(part.traffic for part in counter.work("forward", 1) if part.flops)
    assert traffic == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_operations_of_other_intensity_or_arithmetic_are_kept_apart() -> None:
    counter = WorkCounter()
    x = torch.ones(256, 256, device="simulated:1")
    with observing(counter):
        _ = x @ x
        _ = x[:1] @ x
        _ = x.bfloat16() @ x.bfloat16()
        _ = x + x
    assert [(part.arithmetic, part.flops) for part in counter.work("forward", 1)] == [
        ("", 0),
        ("bfloat16", 2 * 256**3),
        ("float32", 2 * 256**2),
        ("float32", 2 * 256**3),
    ]


def test_float32_is_rounded_where_the_user_lets_it_be() -> None:
    counter = WorkCounter()
    x = torch.ones(16, 16, device="simulated:1")
    torch.set_float32_matmul_precision("high")
    try:
        with observing(counter):
            _ = x @ x
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [part.arithmetic for part in counter.work("forward", 1)] == ["tf32"]


def test_an_optimizer_step_is_work_of_no_forward() -> None:
    counter = WorkCounter()
    weight = torch.nn.Parameter(torch.ones(16, 16, device="simulated:1"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counter.optimizing = True
    with observing(counter):
        optimizer.step()
    assert not counter.work("forward", 1)
    assert sum(part.launches for part in counter.work("optimizer", 1)) > 0


def test_views_take_no_time() -> None:
    counter = WorkCounter()
    x = torch.ones(8, 16, device="simulated:1")
    with observing(counter):
        _ = x.t()[2:].unsqueeze(0)
    assert not counter.work("forward", 1)
