"""Sketches are linear, tell the length of what they are of, and are the same for every backend and size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobalance.execution.equivalence.constant_random import constant_random
from autobalance.execution.equivalence.gradient_sketch import length, sketch_of, sketching, weighted
from autobalance.simulated import simulate


@pytest.mark.parametrize("size", [1, 7, 4096, 5000, 1_100_000])
def test_a_sketch_tells_a_length_and_is_linear(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    one, other = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    assert 0.5 < length(sketch_of(one)) / float(one.norm()) < 1.6
    together = weighted([{"w": sketch_of(one)}, {"w": sketch_of(other)}], [0.75, 0.25])["w"]
    torch.testing.assert_close(together, sketch_of(0.75 * one.double() + 0.25 * other.double()), rtol=1e-5, atol=1e-4)


def test_what_is_equal_but_opposite_far_apart_does_not_cancel() -> None:
    spread = torch.zeros(3 * 4096)
    spread[5], spread[4096 + 5] = 1.0, -1.0  # at the same place of two rows
    assert length(sketch_of(spread)) > 0.5
    assert length(sketch_of(torch.ones(100_000))) > 100


def test_sparse_half_precision_and_simulated_gradients_are_sketched_by_value() -> None:
    dense = torch.zeros(40, 3)
    dense[[2, 5]] = 0.5
    expected = sketch_of(dense)
    assert torch.equal(sketch_of(dense.to_sparse()), expected)
    assert torch.equal(sketch_of(dense.bfloat16()), expected)
    with simulate(1):
        assert torch.equal(sketch_of(dense.to("simulated:0")).cpu(), expected)


def test_gradients_are_taken_as_they_are_made() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    x = torch.ones(4, 3)
    with constant_random(), sketching(layer) as sketches:
        layer(x).sum().backward()
        layer(x).sum().backward()
        assert layer.weight.grad is None
    assert list(sketches) == ["weight"]
    torch.testing.assert_close(sketches["weight"], sketch_of(torch.full((2, 3), 8.0)))
