"""What a profile says, checked by hand calculation; and that making one leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autobalance
from autobalance.profiling.timeline import ROOT

KIB = 1024


class Mlp(nn.Module):
    """256 -> 512 -> 256, no bias: each weight is 512 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)

    def self_balance(self) -> list[nn.Module]:
        return [self.up, self.down]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).sum()


def test_costs_of_a_perceptron_are_those_of_a_hand_calculation() -> None:
    batch = torch.ones(16, 256)  # 16 KiB; 32 KiB between the layers
    profile = autobalance.profile(Mlp(), batch, optimizer=torch.optim.Adam, step=squares)
    up, down = profile.blocks
    assert (up.name, up.kind, down.name) == ("up", "Linear", "down")
    assert (up.weights, up.gradients, up.buffers) == (512 * KIB, 512 * KIB, 0)
    # Two moments; the step counter stays on the host.
    assert (up.optimizer, down.optimizer) == (1024 * KIB, 1024 * KIB)
    assert (up.inputs, up.outputs, down.inputs, down.outputs) == (16 * KIB, 32 * KIB, 32 * KIB, 16 * KIB)
    # A linear layer saves its input, the copy that crossed the door; the square its own, and there is the loss.
    assert (up.saved, down.saved) == (16 * KIB, 32 * KIB + 16 * KIB + 512)
    assert profile.optimizers == ("Adam",)


def test_frozen_half_costs_its_weights_only() -> None:
    """8 frozen and 8 trained layers: static bytes of the best plan are level, where counting weights misjudges them."""
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
    layers[:8].requires_grad_(False)
    weight = 64 * KIB
    profile = autobalance.profile(layers, torch.ones(1, 128), optimizer=torch.optim.Adam, step=squares)
    static = [row.weights + row.gradients + row.optimizer for row in profile.blocks]
    assert static == [weight] * 8 + [4 * weight] * 8
    plan = autobalance.plan(profile, "2x1GiB")
    per_device = [sum(s for s, device in zip(static, plan.assignment, strict=True) if device == d) for d in range(2)]
    assert per_device == [1280 * KIB, 1280 * KIB]
    by_weights = [sum(static[:8]), sum(static[8:])]  # as accelerate's map, which counts weights
    assert by_weights == [512 * KIB, 2048 * KIB]


class Looped(nn.Module):
    """Calls its blocks against the order of declaration, and one of them never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unused = (nn.Linear(8, 8) for _ in range(4))

    def self_balance(self) -> list[str]:
        return ["a", "b", "unused", "c"]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.c(self.b(x)))


def test_blocks_are_in_call_order_and_one_that_is_never_called_follows_its_predecessor() -> None:
    profile = autobalance.profile(Looped(), torch.ones(2, 8), step=squares)
    assert [block.name for block in profile.blocks] == ["b", "unused", "c", "a"]


class Loose(nn.Module):
    """Holds tensors and modules outside every block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.position = nn.Parameter(torch.zeros(64))
        self.register_buffer("mask", torch.ones(64))
        self.register_buffer("nobody", torch.ones(64))

    def self_balance(self) -> list[str]:
        return ["first", "second"]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.position
        return self.second(self.norm(hidden) * self.mask)


def test_tensors_outside_every_block_belong_to_whoever_they_meet_first() -> None:
    profile = autobalance.profile(Loose(), torch.ones(2, 64), step=squares)
    owners = dict(profile.loose)
    assert set(owners) == {"position", "mask", "nobody", "norm.weight", "norm.bias"}
    assert owners["position"] in (0, 1)
    assert {owners["norm.weight"], owners["norm.bias"], owners["mask"]} <= {0, 1}
    assert owners["nobody"] == ROOT


class Borrower(nn.Module):
    """One block uses another's weight without being given it."""

    def __init__(self) -> None:
        super().__init__()
        self.lender, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.user = Uses(self.lender)

    def self_balance(self) -> list[str]:
        return ["lender", "other", "user"]

    def forward(self, x: Tensor) -> Tensor:
        return self.user(self.other(self.lender(x)))


class Uses(nn.Module):
    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        object.__setattr__(self, "lender", lender)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.lender.weight


def test_block_that_uses_anothers_parameter_is_placed_with_it() -> None:
    profile = autobalance.profile(Borrower(), torch.ones(2, 8), step=squares)
    assert profile.together == ((0, 2),)


class ChangesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Doubles(), nn.Linear(8, 8)

    def self_balance(self) -> list[str]:
        return ["first", "second"]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_block_that_changes_the_batch_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="block 'first' changes the batch"):
        autobalance.profile(ChangesBatch(), torch.ones(2, 8), step=squares)


class Decides(Mlp):
    """Looks at numbers: those of a mask are known, those of an activation are not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.way == "mask" and (torch.arange(len(x), device=x.device) > 3).any():
            return x * 2
        if self.way == "item":
            return x * x.sum().item()
        if self.way == "branch" and bool((x > 10**9).any()):
            return x
        if self.way == "selection":
            return x + x[x > 0].sum()
        return x


def test_mask_is_decided_on_without_a_placeholder() -> None:
    (note,) = autobalance.profile(Decides("mask"), torch.ones(8, 256), step=squares).notes
    assert note.startswith("the host waits for the device")


class Routed(nn.Module):
    """Of two experts, the first batch needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.sum() < 0)](x)


def test_parameters_that_the_batch_does_not_train_are_noted() -> None:
    notes = autobalance.profile(Routed(), torch.ones(2, 8), step=squares).notes
    assert notes[0] == (
        "2 trainable parameter(s) got no gradient in the trial (experts.1.weight, experts.1.bias): their gradients and "
        "optimizer state are counted as if they had, since another batch may train them"
    )
    frozen = Routed()
    frozen.experts[1].requires_grad_(False)
    assert len(autobalance.profile(frozen, torch.ones(2, 8), step=squares).notes) == len(notes) - 1


class Alternating(nn.Module):
    """Of two equal experts, one batch trains the first and the next one the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


def test_budget_holds_for_experts_that_the_sampled_batch_does_not_choose() -> None:
    sample, adam = torch.ones(4, 256), torch.optim.Adam
    profile = autobalance.profile(Alternating(), (sample, 0), optimizer=adam, step=lambda m, b: squares_of(m(*b)))
    chosen, other = profile.blocks
    weight = 256 * KIB
    assert (chosen.weights, chosen.gradients, chosen.optimizer) == (weight, weight, 2 * weight)
    assert (other.weights, other.gradients, other.optimizer) == (weight, weight, 2 * weight)
    model = Alternating().to("simulated:0")
    optimizer, batch = adam(model.parameters()), sample.to("simulated:0")
    torch.simulated.reset_peak_memory_stats(0)
    for which in (0, 1, 0, 1):
        optimizer.zero_grad()
        squares_of(model(batch, which)).backward()
        optimizer.step()
    assert torch.simulated.max_memory_allocated(0) <= profile.peak()


def squares_of(output: Tensor) -> Tensor:
    return output.pow(2).sum()


def test_number_that_only_real_data_know_is_noted() -> None:
    note, waits = autobalance.profile(Decides("item"), torch.ones(8, 256), step=squares).notes
    assert waits.startswith("the host waits for the device inside the step, at test_profiler.py:")
    assert "number(s) that only real data know (such as `loss.item()`) were taken as 1.0" in note


@pytest.mark.parametrize("target", ["simulated", "cpu"])
def test_a_real_copy_runs_the_kernels_of_a_target_that_is_here(target: str) -> None:
    real = autobalance.profile(Decides("branch"), torch.ones(8, 256), step=squares, target=target)
    assert real.notes[0].endswith("so one real step was run on a copy of the model in host memory")


@pytest.mark.parametrize("way", ["branch", "selection"])
def test_step_that_cannot_run_on_fakes_is_run_on_a_real_copy_and_says_so(way: str) -> None:
    real = autobalance.profile(Decides(way), torch.ones(8, 256), step=squares, target="A100-80GB")
    fake = autobalance.profile(Mlp(), torch.ones(8, 256), step=squares, target="A100-80GB")
    assert len(real.notes) == 2
    assert "the host waits for the device" in real.notes[1]
    assert "the step cannot run on fake tensors" in real.notes[0]
    assert real.notes[0].endswith(
        "so one real step was run on a copy of the model in host memory, with the kernels of simulated devices, not "
        "those of A100-80GB"
    )
    assert [row.weights for row in real.blocks] == [row.weights for row in fake.blocks]
    assert real.blocks[0].saved == fake.blocks[0].saved


def test_profile_leaves_the_model_and_random_numbers_alone() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    model[3].eval()
    model[0].weight.grad = torch.ones(8, 8)
    model.kept = {"tensor": torch.ones(3)}
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index] # a tuple
    autobalance.profile(model, torch.ones(4, 8), optimizer=torch.optim.AdamW)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert model[0].weight.grad.sum() == 64
    assert model[0].bias.grad is None
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert type(model.kept["tensor"]) is Tensor
    assert random.getstate() == drawn[0]
    assert np.random.get_state()[1].tolist() == drawn[1]  # type: ignore[index] # a tuple
    assert torch.equal(torch.get_rng_state(), drawn[2])


class Keywords(Mlp):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:  # type: ignore[override]
        hidden = super().forward(x)
        return {"loss": hidden.sum() if scale is None else (hidden * scale).sum()}


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4, 256), "scale": torch.ones(256)},
        (torch.ones(4, 256), torch.ones(256)),
        torch.ones(4, 256),
    ],
    ids=["dict", "tuple", "tensor"],
)
def test_batch_is_passed_as_keywords_positionals_or_the_only_argument(batch: Any) -> None:
    assert autobalance.profile(Keywords(), batch).blocks[0].inputs >= 4 * 256 * 4


def test_forward_without_gradients_has_no_gradients_and_saves_nothing() -> None:
    profile = autobalance.profile(Mlp(), torch.ones(16, 256), training=False, optimizer=torch.optim.Adam)
    assert not profile.training
    assert [(row.gradients, row.optimizer) for row in profile.blocks] == [(0, 0), (0, 0)]
    assert profile.peak() < autobalance.profile(Mlp(), torch.ones(16, 256)).peak()


def test_autocast_halves_what_is_between_the_blocks() -> None:
    plain = autobalance.profile(Mlp(), torch.ones(16, 256), step=squares)
    mixed = autobalance.profile(Mlp(), torch.ones(16, 256), step=squares, precision="bf16-mixed")
    assert mixed.precision == "bf16-mixed"
    assert 2 * mixed.blocks[0].outputs == plain.blocks[0].outputs


def test_model_on_meta_is_profiled_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    profile = autobalance.profile(model, torch.ones(2, 4096), optimizer=torch.optim.Adam, step=squares)
    assert [row.weights for row in profile.blocks] == [4096 * 4096 * 4 + 4096 * 4] * 2
    assert all(parameter.is_meta for parameter in model.parameters())


def test_bad_options_are_refused_with_what_exists() -> None:
    with pytest.raises(ValueError, match="target='tpu' names no kernels that autobalance knows; choose 'cuda'"):
        autobalance.profile(Mlp(), torch.ones(1, 256), target="tpu")
    with pytest.raises(ValueError, match="precision='64-true' is not supported for a plain module"):
        autobalance.profile(Mlp(), torch.ones(1, 256), precision="64-true")


class Indices(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def test_output_without_floats_needs_a_step_to_train_but_none_to_predict() -> None:
    with pytest.raises(ValueError, match="holds no floating tensor to run backward from"):
        autobalance.profile(Indices(), torch.ones(1, 256))
    assert autobalance.profile(Indices(), torch.ones(1, 256), training=False).blocks[1].outputs > 0


def test_no_real_step_is_run_that_the_host_cannot_hold() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**18, 2**18, bias=False) for _ in range(2**8)])  # 64 TiB

    with pytest.raises(
        RuntimeError, match=r"cannot run on fake tensors .*\[2, 100\].* over 128\.00 TiB of host memory"
    ):
        autobalance.profile(model, torch.zeros(2, 100))
