"""Random operations give constants that no sample can tell from another's."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autobalance.execution.equivalence.constant_random import constant_random
from autobalance.profiling.sandbox import random_state_kept
from autobalance.simulated import simulate

Draw = Callable[[int], Tensor]

# What one sample gets must not depend on how many there are.
PER_SAMPLE: dict[str, Draw] = {
    "rand": lambda n: torch.rand(n, 3),
    "rand with a generator": lambda n: torch.rand(n, generator=torch.Generator()),
    "rand_like": lambda n: torch.rand_like(torch.empty(n, 2), dtype=torch.float64),
    "uniform_": lambda n: torch.empty(n).uniform_(2, 3),
    "randn": lambda n: torch.randn(n, 3),
    "randn_like": lambda n: torch.randn_like(torch.empty(n, 3)),
    "randn out": lambda n: torch.randn(n, out=torch.empty(0)),
    "normal of tensors": lambda n: torch.normal(torch.ones(n), 2.0),
    "normal_": lambda n: torch.empty(n).normal_(1, 2),
    "randint": lambda n: torch.randint(3, 9, (n,)),
    "random_": lambda n: torch.empty(n, dtype=torch.int64).random_(2, 5),
    "bernoulli": lambda n: torch.full((n,), 0.7).bernoulli(),
    "bernoulli_": lambda n: torch.empty(n).bernoulli_(0.3),
    "multinomial": lambda n: torch.tensor([[0.1, 0.7, 0.2]]).expand(n, 3).multinomial(2),
    "exponential_": lambda n: torch.empty(n).exponential_(2.0),
    "geometric_": lambda n: torch.empty(n).geometric_(0.3),
    "cauchy_": lambda n: torch.empty(n).cauchy_(),
    "log_normal_": lambda n: torch.empty(n).log_normal_(),
    "poisson": lambda n: torch.poisson(torch.full((n,), 3.0)),
    "binomial": lambda n: torch.binomial(torch.full((n,), 10.0), torch.full((n,), 0.3)),
    "gamma": lambda n: torch.distributions.Gamma(torch.ones(n), torch.ones(n)).sample(),
    "dirichlet": lambda n: torch.distributions.Dirichlet(torch.ones(n, 3)).sample(),
    "gumbel": lambda n: functional.gumbel_softmax(torch.ones(n, 3)),
    "rrelu": lambda n: functional.rrelu(-torch.ones(n), training=True),
    "dropout": lambda n: functional.dropout(torch.ones(n, 3), 0.5),
    "alpha dropout": lambda n: functional.alpha_dropout(torch.ones(n, 3), 0.5, training=True),
    "dropout of whole channels": lambda n: functional.dropout1d(torch.ones(n, 3, 2), 0.5),
    "fused dropout": lambda n: torch.native_dropout(torch.ones(n, 3), 0.5, True)[0],
    "numpy": lambda n: torch.full((n,), np.random.rand()),
    "python": lambda n: torch.full((n,), random.random()),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_sample_gets_the_same_in_any_batch_and_on_every_call(name: str) -> None:
    draw = PER_SAMPLE[name]
    with random_state_kept():
        with constant_random():
            whole = draw(5)
        with constant_random():
            part = draw(2)
    assert whole.shape[0] == 5
    assert torch.equal(whole[:2], part)
    assert torch.equal(whole[3:], part)
    assert bool(whole.isfinite().all())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_everything_in_forward_and_backward(rate: float) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with constant_random():
        output = functional.dropout(x, rate)
        output.sum().backward()
    assert x.grad is not None
    assert torch.equal(output, x.grad)
    assert bool((output > 0).all())


def test_dropout_inside_attention_and_recurrent_layers_is_off() -> None:
    attend = torch.randn(2, 1, 4, 8)
    layer = nn.LSTM(3, 3, num_layers=2, dropout=0.5)
    steps = torch.randn(4, 2, 3)
    with constant_random():
        dropped = functional.scaled_dot_product_attention(attend, attend, attend, dropout_p=0.5)
        assert torch.equal(layer(steps)[0], layer(steps)[0])
    kept = functional.scaled_dot_product_attention(attend, attend, attend)
    torch.testing.assert_close(dropped / dropped.sum(), kept / kept.sum())


def test_a_permutation_mixes_samples_so_that_parts_differ_from_the_whole() -> None:
    with constant_random():
        assert torch.randperm(5).tolist() == [4, 3, 2, 1, 0]
        assert torch.randperm(2, generator=torch.Generator()).tolist() == [1, 0]


def test_generators_and_random_states_are_where_they_were() -> None:
    generator = torch.Generator().manual_seed(7)
    own, of_torch, of_python = generator.get_state(), torch.get_rng_state(), random.getstate()
    with random_state_kept(), constant_random():
        torch.rand(3, generator=generator)
        torch.rand(3)
        random.random()
    assert torch.equal(generator.get_state(), own)
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert random.getstate() == of_python


def test_simulated_devices_give_the_constants_too() -> None:
    with simulate(2), random_state_kept(), constant_random():
        x = torch.ones(2, 3, device="simulated:1", requires_grad=True)
        assert functional.dropout(x, 0.5).tolist() == [[2.0] * 3] * 2
        assert torch.equal(torch.randn_like(x)[0].cpu(), torch.randn(3))
        assert torch.randperm(3, device="simulated:0").tolist() == [2, 1, 0]


def test_inference_mode_gives_the_constants_too() -> None:
    with random_state_kept(), constant_random(), torch.inference_mode():
        assert functional.dropout(torch.ones(2), 0.5).tolist() == [1.0, 1.0]
        assert torch.equal(torch.rand(2), torch.rand(2))
