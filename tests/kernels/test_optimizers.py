"""State and temporaries of optimizers as they run on a GPU, counted from the code of torch/optim by hand.

Sixteen equal parameters in float32: a foreach form makes its temporaries for all at once, a loop for one at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import swa_utils

import autobalance
from autobalance.simulated import simulate

COUNT = 16
ONE = 256 * 256 * 4
WORKSPACES = 2 * (8 * 2**20 + 2**17)
SLACK = 2048  # batch, loss and numbers


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(COUNT))

    def self_balance(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


def state_and_temporaries(optimizer: Any, **options: Any) -> tuple[float, float]:
    """In parameters, of one."""
    profile = autobalance.profile(Chain(), torch.zeros(1, 256), optimizer=optimizer, target="A100-80GB", **options)
    state = sum(block.optimizer for block in profile.blocks)
    temporaries = profile.peak(step=2, phase="optimizer") - 2 * COUNT * ONE - state - WORKSPACES
    assert 0 <= temporaries % ONE < SLACK
    return state / ONE, temporaries // ONE


@pytest.mark.parametrize(
    ("optimizer", "state", "foreach", "loop"),
    [
        (optim.SGD, 0, 0, 0),
        (partial(optim.SGD, momentum=0.9), 1, 0, 0),
        (partial(optim.SGD, momentum=0.9, weight_decay=0.1), 1, COUNT, 1),
        (optim.Adam, 2, COUNT, 3),
        (partial(optim.Adam, weight_decay=0.1), 2, COUNT, 4),
        (optim.AdamW, 2, COUNT, 3),
        (partial(optim.AdamW, amsgrad=True), 3, COUNT, 3),
        (optim.RMSprop, 1, COUNT, 2),
        (optim.NAdam, 2, COUNT, 3),
        (optim.RAdam, 2, COUNT, 2),
        (optim.Adamax, 2, COUNT, 1),
        (optim.Adagrad, 1, 2 * COUNT, 2),
        (optim.Adadelta, 2, 2 * COUNT, 3),
    ],
)
def test_state_and_temporaries_are_those_of_the_form_that_a_gpu_runs(
    optimizer: Any, state: int, foreach: int, loop: int
) -> None:
    build = partial(optimizer, lr=1e-3)
    assert state_and_temporaries(build) == (state * COUNT, foreach)
    assert state_and_temporaries(partial(build, foreach=False)) == (state * COUNT, loop)


@pytest.mark.parametrize(
    ("optimizer", "state"), [(optim.SGD, 0), (optim.Adam, 2), (optim.AdamW, 2), (optim.Adagrad, 1)]
)
def test_fused_optimizers_have_no_temporaries_and_keep_their_step_on_the_gpu(optimizer: Any, state: int) -> None:
    steps = 512 / ONE * COUNT if state else 0
    assert state_and_temporaries(partial(optimizer, lr=1e-3, fused=True)) == (state * COUNT + steps, 0)


class ThirdParty(optim.Optimizer):
    """Keeps two moments and the first gradients, and makes two temporaries a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # the base class returns the closure's loss
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for name in ("one", "two", "three"):
                state.setdefault(name, torch.zeros_like(parameter))
            scaled = parameter.grad * 2
            parameter.add_(scaled.sqrt())


def test_third_party_optimizer_is_traced_as_it_is_written() -> None:
    assert state_and_temporaries(ThirdParty) == (3 * COUNT, 2)


class Momentum(optim.Optimizer):
    """As one from another library: a state of half precision, and temporaries of several sizes."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # the base class returns the closure's loss
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["rows"] = parameter.new_zeros(parameter.shape[0])
                wide = state["moment"].float().mul_(0.9).add_(parameter.grad)
                state["moment"].copy_(wide)
                state["rows"].lerp_(wide.square().mean(1), 0.1)
                parameter.addcdiv_(wide, state["rows"].sqrt()[:, None] + 1e-8, value=-group["lr"])


OWN_CODE = {
    "Adafactor": optim.Adafactor,
    "Adafactor, loop": partial(optim.Adafactor, foreach=False),
    "ASGD": optim.ASGD,
    "ASGD, loop": partial(optim.ASGD, foreach=False),
    "Rprop": optim.Rprop,
    "Rprop, loop": partial(optim.Rprop, foreach=False),
    "Muon": optim.Muon,
    "third party": Momentum,
}


def counted(optimizer: Any) -> tuple[int, int]:
    """Bytes of the state, and of the temporaries of a second step, with real numbers on a simulated device."""
    with simulate(1):
        parameters = [*Chain().to("simulated:0").parameters()]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        built = optimizer(parameters)
        before = torch.simulated.memory_allocated(0)
        built.step()
        after = torch.simulated.memory_allocated(0)
        torch.simulated.reset_peak_memory_stats(0)
        built.step()
        return after - before, torch.simulated.max_memory_allocated(0) - after


@pytest.mark.parametrize("name", OWN_CODE)
def test_state_and_temporaries_are_those_that_an_optimizers_own_code_takes(name: str) -> None:
    state, temporaries = counted(partial(OWN_CODE[name], lr=1e-3))
    profile = autobalance.profile(
        Chain(), torch.zeros(1, 256), optimizer=partial(OWN_CODE[name], lr=1e-3), target="A100-80GB"
    )
    assert sum(block.optimizer for block in profile.blocks) == state
    held = 2 * COUNT * ONE + state + WORKSPACES
    assert 0 <= profile.peak(step=2, phase="optimizer") - held - temporaries < SLACK


class Averaged(nn.Module):
    """A model with an exponential average of itself, which its steps update."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain()
        self.average = swa_utils.AveragedModel(self.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99))
        self.average.requires_grad_(False)  # else an optimizer that is given all parameters would train it

    def self_balance(self) -> list[nn.Module]:
        return [*self.net.layers]


def averaged_step(model: Averaged, batch: Tensor) -> Tensor:
    loss: Tensor = model.net(batch).sum()
    model.average.update_parameters(model.net)
    return loss


def test_an_average_of_the_model_is_counted_with_what_its_update_takes() -> None:
    profile = autobalance.profile(
        Averaged(), torch.zeros(1, 256), optimizer=partial(optim.SGD, lr=1e-3), step=averaged_step, target="simulated"
    )
    with simulate(1):
        torch.simulated.reset_peak_memory_stats(0)
        model, batch = Averaged().to("simulated:0"), torch.zeros(1, 256, device="simulated:0")
        optimizer = optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = averaged_step(model, batch)
            loss.backward()
            optimizer.step()
        peak = torch.simulated.max_memory_allocated(0)
    assert profile.peak() == peak
    assert peak > 3 * COUNT * ONE  # weights, their average, and gradients


def test_gradient_scaler_and_clipping_leave_no_temporaries_of_the_gradients_size() -> None:
    """Unscaling and clipping work in place; a scale, its tracker, and a number a gradient are all they make."""
    plain = autobalance.profile(Chain(), torch.zeros(1, 256), optimizer=optim.SGD, target="A100-80GB")
    scaled = autobalance.profile(
        Chain(), torch.zeros(1, 256), optimizer=optim.SGD, target="A100-80GB", precision="16-mixed", clip=1.0
    )
    most = 2 * COUNT * ONE + WORKSPACES + 64 * 512
    assert plain.peak(step=2, phase="optimizer") <= most
    assert scaled.peak(step=2, phase="optimizer") <= most
