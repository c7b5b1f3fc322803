"""A block that cannot run without numbers is measured by itself; its bytes are those of a whole step with numbers."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autobalance
from autobalance.blocks import find_blocks
from autobalance.kernels.target import find_target
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial

WIDTH = 64


class Copied(torch.autograd.Function):
    """A kernel that is given raw pointers, and takes bytes inside and for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, scratch, kept = torch.empty_like(x), x.new_empty(5 * x.numel()), x.new_empty(2 * x.numel())
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        del scratch
        ctx.save_for_backward(x, kept)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        scratch = x.new_empty(7 * x.numel())
        made = torch.empty_like(x)
        ctypes.memmove(made.data_ptr(), gradient.data_ptr(), x.nbytes)
        del scratch
        return made


class Pointers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Copied.apply(self.linear(x))


class Selects(Pointers):
    """Shapes depend on numbers that are not known."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return {"x": x + x[x > 0].sum(), "pair": (x, None)}


class LooksBack(Pointers):
    """Its backward looks at numbers, its forward does not."""

    def forward(self, x: Tensor) -> Tensor:
        return Looks.apply(self.linear(x))


class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if bool((gradient > 1e9).any()) else 3)


@torch.library.custom_op("autobalance_tests::shift", mutates_args=())
def shift(x: Tensor) -> Tensor:
    """An operator that says nothing of the shapes of its results."""
    return x + 1


shift.register_autograd(lambda ctx, gradient: gradient * 1)


class Shifts(Pointers):
    def forward(self, x: Tensor) -> Tensor:
        return shift(self.linear(x))


class Grows(Pointers):
    """Keeps little, while the gradient of its large weight comes late: the peak is not where everything is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 32 * WIDTH)
        self.back = nn.Linear(32 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.sigmoid(Copied.apply(self.linear(x))))


class Model(nn.Module):
    """Three plain blocks around two opaque ones."""

    def __init__(self, opaque: Callable[[], nn.Module], checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), opaque(), nn.Linear(WIDTH, WIDTH), opaque(), nn.Linear(WIDTH, WIDTH)]
        )
        self.checkpointed = checkpointed

    def self_balance(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = x["pair"][0] + x["x"] if isinstance(x, dict) else x
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).sum()


def with_numbers(model: nn.Module, batch: Tensor, target: str) -> Profile:
    """Every block on real numbers: what is done where no block is to blame."""
    trial = PlainTrial(torch.optim.SGD, squares)
    profiler = Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", batch)])
    profiler.target = find_target(target)
    profiler._kind = "real"
    return profiler.profile()


@pytest.mark.parametrize("target", ["simulated", "cpu"])
@pytest.mark.parametrize("kind", [Pointers, Selects, LooksBack, Shifts, Grows])
def test_bytes_of_an_opaque_block_are_those_of_a_step_with_numbers(kind: type[nn.Module], target: str) -> None:
    model, batch = Model(kind), torch.ones(32, WIDTH)
    profile = autobalance.profile(model, batch, optimizer=torch.optim.SGD, step=squares, target=target)
    real = with_numbers(model, batch, target)
    for row, expected in zip(profile.blocks, real.blocks, strict=True):
        seen = (row.weights, row.gradients, row.saved, row.forward_transient, row.backward_transient, row.outputs)
        assert seen == (
            expected.weights,
            expected.gradients,
            expected.saved,
            expected.forward_transient,
            expected.backward_transient,
            expected.outputs,
        )
    assert profile.peak() == real.peak()


def test_the_note_says_which_blocks_and_why_and_the_rest_is_traced() -> None:
    profile = autobalance.profile(Model(Selects), torch.ones(32, WIDTH), step=squares, target="simulated")
    assert profile.notes == (
        "blocks 'layers.1', 'layers.3' cannot run on tensors without numbers (DynamicOutputShapeException: "
        "aten.nonzero.default): run on random ones on simulated:0, forward and backward, and measured there; the rest "
        "is traced",
    )


def test_work_of_an_opaque_block_is_counted() -> None:
    batch = torch.ones(32, WIDTH)
    opaque = autobalance.profile(Model(Pointers), batch, step=squares, target="simulated").blocks[1]
    plain = autobalance.profile(Model(lambda: nn.Linear(WIDTH, WIDTH)), batch, step=squares).blocks[1]
    assert sum(work.flops for work in opaque.forward_work) == sum(work.flops for work in plain.forward_work)
    assert sum(work.flops for work in opaque.backward_work) == sum(work.flops for work in plain.backward_work)
    assert opaque.forward_time > 0


def test_opaque_block_under_a_checkpoint_keeps_nothing_until_its_backward() -> None:
    batch = torch.ones(32, WIDTH)
    model = Model(Pointers, checkpointed=True)
    profile = autobalance.profile(model, batch, optimizer=torch.optim.SGD, step=squares, target="simulated")
    real = with_numbers(model, batch, "simulated")
    assert [row.saved for row in profile.blocks] == [row.saved for row in real.blocks]
    assert profile.peak() == real.peak()


def test_forecast_of_a_placement_with_opaque_blocks_is_what_devices_count() -> None:
    model, batch = Model(Pointers), torch.ones(32, WIDTH)
    trial = PlainTrial(torch.optim.SGD, squares)
    profiler = Profiler(model, find_blocks(model), trial, [Batch("train batch", "train", batch)])
    profile = profiler.profile()
    assert "blocks 'layers.1', 'layers.3'" in profile.notes[0]
    found = profiler.forecast(profile.names, [0, 0, 1, 1, 1], {}, 1, 2)
    profiler._kind = "real"
    real = profiler.forecast(profile.names, [0, 0, 1, 1, 1], {}, 1, 2)
    assert [device.peak for device in found] == [device.peak for device in real]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_opaque_block_has_the_precision_of_the_step(precision: str) -> None:
    batch = torch.ones(32, WIDTH)
    profile = autobalance.profile(Model(Selects), batch, step=squares, target="simulated", precision=precision)
    assert "measured there" in profile.notes[0]
    plain = autobalance.profile(Model(Selects), batch, step=squares, target="simulated")
    assert 2 * profile.blocks[1].outputs == plain.blocks[1].outputs


def test_the_model_is_left_alone() -> None:
    model = Model(Pointers)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    drawn = torch.get_rng_state()
    allocated = torch.simulated.memory_allocated(0)
    autobalance.profile(model, torch.ones(32, WIDTH), optimizer=torch.optim.SGD, step=squares, target="simulated")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.simulated.memory_allocated(0) == allocated


def test_a_graph_that_somebody_keeps_does_not_keep_the_model_alive() -> None:
    kept: list[Tensor] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        kept.append(model(batch))
        return kept[-1].sum()

    model = Model(lambda: nn.Linear(WIDTH, WIDTH))
    alive = weakref.ref(model)
    autobalance.profile(model, torch.ones(2, WIDTH), step=step, target="simulated")
    del model
    gc.collect()
    assert kept
    assert alive() is None


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this layer is broken")


def test_an_error_of_the_users_own_is_the_one_that_is_raised() -> None:
    with pytest.raises(RuntimeError, match="this layer is broken"):
        autobalance.profile(Model(Broken), torch.ones(2, WIDTH), step=squares, target="simulated")
