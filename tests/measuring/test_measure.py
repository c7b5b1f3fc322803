"""Measured bytes are those of a hand calculation and of the trace, and measuring leaves nothing behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.blocks import Blocks, find_blocks
from autobalance.measuring import meters
from autobalance.measuring.measure import measure
from autobalance.measuring.measurement import Measurement
from autobalance.profiling.trial import Batch, PlainTrial
from autobalance.simulated import simulate
from tests.models import CASES
from tests.profiling.running import training_step

KIB = 1024


class Mlp(nn.Sequential):
    """256 -> 512 -> 256, no bias: each weight is 512 KiB."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 512, bias=False), nn.Sigmoid(), nn.Linear(512, 256, bias=False))

    def self_balance(self) -> list[nn.Module]:
        return list(self)


def measured(model: nn.Module, data: Any, device: str = "simulated:1", **options: Any) -> tuple[Measurement, ...]:
    trial = PlainTrial(torch.optim.Adam, **options)
    return measure(model, Batch("train batch", "train", data), find_blocks(model), trial, device)


@pytest.mark.parametrize("device", ["simulated:1", "cpu"])
def test_bytes_of_a_perceptron_are_those_of_a_hand_calculation(device: str) -> None:
    up, sigmoid, down = measured(Mlp(), torch.ones(16, 256), device)
    assert (up.name, up.static, up.saved) == ("0", 512 * KIB, 16 * KIB)  # a linear layer saves its input,
    assert (sigmoid.static, sigmoid.saved) == (0, 32 * KIB)  # a sigmoid its output
    assert up.forward_peak == (512 + 16 + 32) * KIB
    # The batch needs no gradient: input, gradient of the output, gradient of the weight.
    assert up.backward_peak == (512 + 16 + 32 + 512) * KIB
    assert sigmoid.backward_peak == (32 + 32 + 32) * KIB
    # The gradient of the input is there before that of the weight, and the gradient of the output until both are.
    assert down.backward_peak == (512 + 32 + 16 + 512 + 32) * KIB
    assert up.forward_time > 0
    assert up.backward_time > 0
    assert up.exact


@pytest.mark.parametrize("name", ["lstm", "batch norm convnet"])
def test_static_and_saved_bytes_of_a_block_without_glue_are_those_of_its_trace(name: str) -> None:
    model: Any = CASES[name].make(nn.Module)
    data = CASES[name].batches(1)[0]
    trial = PlainTrial(torch.optim.Adam, training_step)
    found = measure(model, Batch("train batch", "train", data), find_blocks(model), trial, "simulated:0")
    profile = autobalance.profile(model, data, optimizer=torch.optim.Adam, step=training_step)
    assert [row.static for row in found] == [row.weights + row.buffers for row in profile.blocks]
    assert found[0].saved == profile.blocks[0].saved
    assert found[0].forward_peak == found[0].static + profile.blocks[0].saved + profile.blocks[0].forward_transient


@pytest.mark.parametrize("name", CASES)
def test_steps_of_every_kind_of_model_go_through(name: str) -> None:
    case = CASES[name]
    model = case.make(nn.Module)
    trial = PlainTrial(torch.optim.Adam, training_step)
    found = measure(model, Batch("train batch", "train", case.batches(1)[0]), find_blocks(model), trial, "simulated:0")
    assert len(found) == len(find_blocks(model))
    assert all(row.forward_time > 0 and row.backward_time > 0 for row in found)


class Everything(nn.Module):
    """Dropout, batch norm, an auxiliary loss that a block keeps, and a block that draws with its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
        self.second = Keeper()
        self.scale = nn.Parameter(torch.ones(8))

    def self_balance(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x) * self.scale)
        return x.sum() + self.second.auxiliary


class Keeper(nn.Module):
    auxiliary: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        x = self.linear(x)
        self.auxiliary = x.pow(2).mean()
        return x


def test_measuring_leaves_nothing_behind() -> None:
    model = Everything()
    model.first[0].weight.grad = torch.ones(8, 8)
    model.first[2].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = [tensor._version for tensor in model.state_dict().values()]
    modes = [module.training for module in model.modules()]
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index] # a tuple
    attributes = {key for module in model.modules() for key in vars(module)}
    allocated = []
    for _ in range(5):
        gc.collect()
        before = torch.simulated.memory_allocated(1)
        measured(model, torch.ones(4, 8))
        allocated.append(torch.simulated.memory_allocated(1) - before)
    assert allocated == [0] * 5
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [tensor._version for tensor in model.state_dict().values()] == versions
    assert [module.training for module in model.modules()] == modes
    assert model.first[0].weight.grad.sum() == 64
    assert model.first[0].bias.grad is None
    assert {key for module in model.modules() for key in vars(module)} == attributes
    assert random.getstate() == drawn[0]
    assert np.random.get_state()[1].tolist() == drawn[1]  # type: ignore[index] # a tuple
    assert torch.equal(torch.get_rng_state(), drawn[2])


class Counted(nn.Module):
    """Counts how often it runs, in all copies."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return self.linear(x)


def test_equal_blocks_are_measured_once_and_say_whose_figures_they_have() -> None:
    Counted.runs = 0
    measured(nn.Sequential(Counted(), Counted()), torch.ones(4, 8))
    of_two = Counted.runs  # the second is given something that needs a gradient, so that it is measured too
    Counted.runs = 0
    found = measured(nn.Sequential(*(Counted() for _ in range(5))), torch.ones(4, 8))
    assert Counted.runs == of_two + 3  # each passes on what it is given
    assert [row.like for row in found] == ["", "", "1", "1", "1"]
    assert found[3].saved == found[1].saved
    assert found[3].forward_time == found[1].forward_time


def test_blocks_that_do_not_fit_with_the_whole_batch_are_extrapolated_and_say_so() -> None:
    model, data = Mlp(), torch.ones(1024, 256)
    whole = measured(model, data)
    with simulate("1x2560KiB"):  # 1024 samples take 1 MiB of input and 2 MiB of output
        halved = measured(model, data, "simulated:0")
    assert not halved[0].exact
    assert halved[0].notes == (
        "0: 1024 samples did not fit on simulated:0: figures are extrapolated from those of 256 and 512 samples",
    )
    for small, large in zip(halved, whole, strict=True):
        assert (small.saved, small.static, small.forward_peak) == (large.saved, large.static, large.forward_peak)


def test_a_block_that_does_not_fit_at_all_is_named_with_what_to_do() -> None:
    with simulate("1x256KiB"), pytest.raises(RuntimeError) as caught:
        measured(Mlp(), torch.ones(4, 256), "simulated:0")
    assert str(caught.value).startswith(
        "block '0' cannot be measured on simulated:0: its weights and buffers take 512.00 KiB, for which there is no "
        "room (simulated:0 out of memory"
    )
    assert "split the block, or profile without measuring" in str(caught.value)
    with simulate("1x513KiB"), pytest.raises(RuntimeError, match=r"block '0' .* a single sample does not fit"):
        measured(Mlp(), torch.ones(4, 256), "simulated:0")


def test_a_model_on_meta_is_measured_one_block_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))  # 1 MiB each
    with simulate("1x4MiB"):
        found = measured(model, torch.ones(4, 512), "simulated:0")
        assert torch.simulated.max_memory_allocated(0) < 3 * 1024 * KIB  # a weight, its gradient and little more
    assert [row.static for row in found] == [1024 * KIB] * 8
    assert all(parameter.is_meta for parameter in model.parameters())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused = nn.Linear(256, 256, bias=False), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x))


def test_calls_of_one_block_add_up_and_one_that_is_not_called_has_static_bytes_only() -> None:
    model = Twice()
    blocks = Blocks.of(model, [[model.shared], [model.unused]])
    trial = PlainTrial(torch.optim.Adam)
    shared, unused = measure(model, Batch("train batch", "train", torch.ones(16, 256)), blocks, trial, "simulated:1")
    assert (shared.static, shared.saved) == (256 * KIB, 2 * 16 * KIB)
    assert (unused.static, unused.saved, unused.forward_time) == (257 * KIB, 0, 0.0)


def test_mixed_precision_is_that_of_the_step() -> None:
    plain = measured(Mlp(), torch.ones(16, 256))
    mixed = measured(Mlp(), torch.ones(16, 256), precision="bf16-mixed")
    assert mixed[1].saved == plain[1].saved // 2  # a sigmoid's output
    half = measured(Mlp(), torch.ones(16, 256), precision="bf16-true")
    assert half[0].static == plain[0].static // 2


def test_a_forward_pass_alone_has_no_backward() -> None:
    trial = PlainTrial(training=False)
    model = Mlp()
    found = measure(model, Batch("predict batch", "predict", torch.ones(16, 256)), find_blocks(model), trial, "cpu")
    assert [(row.saved, row.backward_time) for row in found] == [(0, 0.0)] * 3


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("simulated:7", "simulated:7 is not there: this process sees 4 simulated device"),
        ("meta", "meta has no memory counters; measure on 'cuda:0', a simulated device or 'cpu'"),
    ],
)
def test_devices_that_cannot_be_measured_on_are_named(device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measured(Mlp(), torch.ones(1, 256), device)


def test_a_profile_that_measures_has_measured_times_and_traced_bytes() -> None:
    data = torch.ones(512, 256)
    traced = autobalance.profile(Mlp(), data, target="simulated")
    found = autobalance.profile(Mlp(), data, target="simulated", measure="simulated:0")
    assert [row.saved for row in found.blocks] == [row.saved for row in traced.blocks]
    assert found.timeline == traced.timeline
    assert all(row.forward_time != other.forward_time for row, other in zip(found.blocks, traced.blocks, strict=True))


def losses(model: nn.Module, data: Sequence[Tensor]) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_after_measuring_is_that_without() -> None:
    data = [torch.randn(4, 8) for _ in range(3)]
    torch.manual_seed(1)
    plain = Everything()
    torch.manual_seed(1)
    other = Everything()
    measured(other, data[0])
    assert losses(other, data) == losses(plain, data)


@pytest.mark.cuda
def test_a_gpu_is_left_as_it_was() -> None:
    before = torch.cuda.memory_allocated(0)
    for _ in range(5):
        found = measured(Mlp(), torch.ones(16, 256), "cuda:0")
        assert found[0].static == 512 * KIB
        assert torch.cuda.memory_allocated(0) <= before


def test_simulated_devices_that_nobody_configured_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOBALANCE_SIMULATE", raising=False)
    monkeypatch.setattr(meters.simulated, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"simulated:0 is not there: no simulated devices are configured; call"):
        meters.make_meter("simulated:0")
